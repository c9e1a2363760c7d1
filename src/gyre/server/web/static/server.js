// Server: what is known of it. In: its health, its models. Out: a state that the page shows, asked anew as long as the page is seen.

import { ApiFailure, getHealth, getJson, readKey } from "./api.js";

const LOOK_MS = 5000;
const LONGEST_WAIT_MS = 15_000; // between two looks at a server that does not answer

// phase: "connecting", "ready", "locked" (it asks for a key), "unready" (no engine is well), "unreachable"
export class Server {
  constructor(onChange) {
    this.onChange = onChange;
    this.state = { phase: "connecting", model: "", contextTokens: 0, version: null, reason: "" };
    this.misses = 0;
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.look(); });
  }

  // Ask now, and again after a while. Only one look is under way at a time.
  async look() {
    clearTimeout(this.timer);
    if (this.looking) return this.looking;
    this.looking = this.ask();
    try {
      await this.looking;
    } finally {
      this.looking = null;
    }
    if (!document.hidden) this.timer = setTimeout(() => this.look(), Math.min(LONGEST_WAIT_MS, LOOK_MS * 2 ** Math.max(0, this.misses - 2)));
  }

  async ask() {
    try {
      const { ready, reason } = await getHealth();
      const { id, max_model_len: contextTokens, version } = (await getJson("/v1/models")).data[0];
      this.misses = 0;
      this.take({ phase: ready ? "ready" : "unready", model: id, contextTokens, version, reason });
    } catch (error) {
      if (!(error instanceof ApiFailure)) throw error;
      if (error.status === 401) {
        this.misses = 0;
        this.take({ phase: "locked", reason: readKey() ? "The key is not valid" : "A key is needed" });
      } else {
        this.misses += 1;
        this.take({ phase: "unreachable", reason: error.message });
      }
    }
  }

  take(changed) {
    this.state = { ...this.state, ...changed };
    this.onChange(this.state);
  }
}
