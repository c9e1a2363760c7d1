// Key: asks for the API key. In: what is typed. Out: the key in this tab's storage, which ends with the tab.

import { readKey, saveKey } from "./api.js";
import { button, el } from "./dom.js";

export function mountKey(dialog, onSaved) {
  const input = el("input", { id: "key-text", type: "password", autocomplete: "off", spellcheck: "false", "aria-describedby": "key-note" });
  const save = (key) => {
    saveKey(key);
    dialog.close();
    onSaved();
  };
  const forget = button("Forget it", () => save(""));
  const form = el("form", { method: "dialog" },
    el("h2", { id: "key-title" }, "API key"),
    el("label", { for: "key-text" }, "Key"),
    input,
    el("p", { class: "note", id: "key-note" }, "It stays in this tab until the tab is closed, and goes to this server alone, in a header."),
    el("div", { class: "row end" }, forget, button("Cancel", () => dialog.close()), el("button", { type: "submit", class: "btn strong" }, "Use this key")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (input.value.trim()) save(input.value.trim());
    else input.focus();
  });
  dialog.append(form);
  dialog.addEventListener("close", () => { input.value = ""; });
  return () => {
    forget.hidden = !readKey();
    dialog.showModal();
    input.focus();
  };
}
