// Main: puts the parts of the page together: views, theme, dialogs, and what the bar says of the server.

import { Chat } from "./chat.js";
import { byId, icon } from "./dom.js";
import { mountKey } from "./key.js";
import { Live } from "./live.js";
import { Server } from "./server.js";
import { mountSettings } from "./settings.js";
import { browser } from "./storage.js";
import { hidePeek, movePeek } from "./tokens.js";

const WIDE = matchMedia("(min-width: 1080px)"); // settings stand beside the chat; below, they cover it

const server = new Server(showServer);
const settings = mountSettings(byId("settings"), { onChange: () => chat?.drawComposer(), onClose: showSettingsState });
const openKey = mountKey(byId("key"), async () => {
  await server.looking; // which still asks with the key from before
  await server.look();
  live.look();
});
const live = new Live(byId("live-view"), server, { openKey });
const chat = new Chat(settings, server, { openSettings, openKey, refresh: () => server.look() });

function openSettings(field = "") {
  const dialog = byId("settings");
  if (!dialog.open) {
    if (WIDE.matches) dialog.show();
    else dialog.showModal();
  }
  if (field) settings.focus(field);
  showSettingsState();
}

function showSettingsState() {
  byId("open-settings").setAttribute("aria-expanded", String(byId("settings").open));
}

function showServer({ phase, model, reason }) {
  const node = byId("server");
  const texts = { connecting: "Connecting", ready: model, locked: reason, unready: "No engine is ready", unreachable: "Looking for the server" };
  node.dataset.phase = phase;
  node.title = reason;
  if (byId("server-text").textContent !== texts[phase]) byId("server-text").textContent = texts[phase];
  document.title = model ? `${model} – Gyre` : "Gyre";
  if (!chat.messages.length) chat.draw();
  if (phase === "locked" && !showServer.hasAsked) {
    showServer.hasAsked = true; // once; after that whoever reads decides
    openKey();
  }
}

function showView() {
  const isLive = location.hash === "#live";
  byId("chat-view").hidden = isLive;
  byId("live-view").hidden = !isLive;
  for (const [id, isHere] of [["to-chat", !isLive], ["to-live", isLive]]) {
    if (isHere) byId(id).setAttribute("aria-current", "page");
    else byId(id).removeAttribute("aria-current");
  }
  for (const id of ["new-chat", "open-settings"]) byId(id).hidden = isLive;
  hidePeek();
  if (isLive) live.look();
}

function mountTheme() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const sun = "M12 3v2M12 19v2M3 12h2M19 12h2M5.6 5.6l1.4 1.4M17 17l1.4 1.4M5.6 18.4L7 17M17 7l1.4-1.4M12 8a4 4 0 1 0 0 8a4 4 0 0 0 0-8";
  const moon = "M20 14.5A8 8 0 1 1 9.5 4a6.5 6.5 0 0 0 10.5 10.5";
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => byId("theme").replaceChildren(icon(isDark() ? sun : moon));
  const stored = browser.read("gyre.theme");
  if (["light", "dark"].includes(stored)) root.dataset.theme = stored;
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    browser.write("gyre.theme", root.dataset.theme);
    show();
  });
  system.addEventListener("change", show);
  show();
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog:modal")) chat.stop();
});
document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".tok, .peek")) hidePeek(); });
document.addEventListener("scroll", movePeek, { capture: true, passive: true });
byId("new-chat").addEventListener("click", () => chat.clear());
byId("open-key").addEventListener("click", openKey);
byId("open-settings").addEventListener("click", () => (byId("settings").open ? byId("settings").close() : openSettings()));
// what stands beside the chat on a wide screen would cover it on a narrow one
WIDE.addEventListener("change", () => byId("settings").close());
addEventListener("hashchange", showView);
mountTheme();
showView();
if (WIDE.matches) openSettings();
if (location.hash !== "#live") byId("ask").focus();
server.look();
