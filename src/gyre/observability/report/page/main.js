// Main: builds the page in order, then the navigation and the theme.

function navigation() {
  const names = { overview: "Overview", curves: "Curves", time: "Time", memory: "Memory", rollouts: "Rollouts", events: "Events", files: "Config" };
  const links = new Map();
  for (const node of document.querySelectorAll("main > section")) {
    const link = el("a", { href: `#${node.id}` }, names[node.id]);
    links.set(node, link);
    document.getElementById("nav").append(link);
  }
  const mark = () => {
    let current = null;
    for (const node of links.keys()) if (current === null || node.getBoundingClientRect().top < window.innerHeight * 0.35) current = node;
    if (window.innerHeight + window.scrollY >= document.body.scrollHeight - 4) current = [...links.keys()].pop();
    for (const [node, link] of links) {
      if (node === current) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    }
  };
  addEventListener("scroll", mark, { passive: true });
  mark();
}

function theme() {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const sun = "M12 3v2M12 19v2M3 12h2M19 12h2M5.6 5.6l1.4 1.4M17 17l1.4 1.4M5.6 18.4L7 17M17 7l1.4-1.4M12 8a4 4 0 1 0 0 8a4 4 0 0 0 0-8";
  const moon = "M20 14.5A8 8 0 1 1 9.5 4a6.5 6.5 0 0 0 10.5 10.5";
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => button.replaceChildren(svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: isDark() ? sun : moon })));
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; show(); tell("theme"); });
  system.addEventListener("change", () => { show(); tell("theme"); });
  show();
}

function footer() {
  document.getElementById("footer").append(
    el("span", {}, `Gyre${RUN.gyre ? ` ${RUN.gyre}` : ""} · ${RUN.folder} · ${count(RUN.numEvents)} events`),
    el("span", {}, "One file, made from events.jsonl. It loads nothing and sends nothing."));
}

// A part that fails says so in its place; the others still stand.
for (const part of [overview, curves, timeSection, memorySection, rolloutSection, eventSection, fileSection, navigation, theme, footer]) {
  try {
    part();
  } catch (error) {
    console.error(error);
    document.getElementById("main").append(note(`A part of this page failed (${part.name}: ${error.message}). The run's data are in events.jsonl.`));
  }
}
