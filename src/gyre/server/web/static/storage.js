// Storage: what outlives a reload. The theme stays in this browser; settings and the key last as long as the tab.
// A browser may forbid storage: then a value lasts as long as the page.

class Store {
  constructor(open) {
    this.values = new Map();
    try {
      this.storage = open();
    } catch (error) {
      console.warn(`storage is not allowed here: ${error.message}`);
      this.storage = null;
    }
  }

  read(name) {
    return this.storage === null ? (this.values.get(name) ?? null) : this.storage.getItem(name);
  }

  write(name, value) {
    if (this.storage === null) this.values.set(name, value);
    else this.storage.setItem(name, value);
  }

  remove(name) {
    this.values.delete(name);
    if (this.storage !== null) this.storage.removeItem(name);
  }
}

export const tab = new Store(() => window.sessionStorage);
export const browser = new Store(() => window.localStorage);
