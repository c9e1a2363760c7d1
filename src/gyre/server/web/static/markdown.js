// Markdown: a small part of it as elements. In: text that a model wrote. Out: nodes, whose text is that text.
// Markup is never parsed: a tag in the text is shown as it stands. Links lead to http and https alone.

import { el } from "./dom.js";

// Show `text` in `node`. Blocks that have not changed since the last call keep their elements, and with them a selection.
export function showMarkdown(node, text) {
  const blocks = splitBlocks(text);
  const shown = (node.blocks ??= []);
  let same = 0;
  while (same < blocks.length && same < shown.length && blocks[same].source === shown[same]) same += 1;
  while (node.childNodes.length > same) node.lastChild.remove();
  for (const block of blocks.slice(same)) node.append(draw(block));
  node.blocks = blocks.map((block) => block.source);
}

// Every repetition is bounded: a model that repeats itself must not hold the page up.
const FENCE = /^ {0,3}(`{3,9}|~{3,9})[ \t]{0,8}([\w+#.-]{0,40})[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s{0,8})([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^>\s?(.*)$/;

export function splitBlocks(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  const take = (test) => {
    const from = at;
    while (at < lines.length && test(lines[at], at - from)) at += 1;
    return lines.slice(from, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const from = at;
    const fence = FENCE.exec(line);
    let block;
    if (!line.trim()) {
      at += 1;
      continue;
    } else if (fence) {
      at += 1;
      const body = take((one) => !(one.trim().startsWith(fence[1]) && !one.trim().slice(fence[1].length).trim()));
      at += 1; // the closing fence, which a stream may not have brought yet
      block = { kind: "code", language: fence[2], text: body.join("\n") };
    } else if (HEADING.test(line)) {
      at += 1;
      const [, marks, title] = HEADING.exec(line);
      block = { kind: "heading", level: marks.length, text: title };
    } else if (ITEM.test(line)) {
      const rows = take((one, number) => number === 0 || ITEM.test(one) || (/^\s+\S/.test(one) && !FENCE.test(one)));
      block = { kind: "list", rows };
    } else if (QUOTE.test(line)) {
      block = { kind: "quote", text: take((one) => QUOTE.test(one)).map((one) => QUOTE.exec(one)[1]).join("\n") };
    } else {
      block = { kind: "text", text: take((one, number) => number === 0 || (one.trim() && ![FENCE, HEADING, ITEM, QUOTE].some((form) => form.test(one)))).join("\n") };
    }
    blocks.push({ ...block, source: lines.slice(from, at).join("\n") });
  }
  return blocks;
}

function draw(block) {
  if (block.kind === "code") return drawCode(block);
  if (block.kind === "heading") return el("p", { class: "head", role: "heading", "aria-level": Math.min(6, block.level + 2) }, inline(block.text));
  if (block.kind === "list") return drawList(block.rows);
  if (block.kind === "quote") return el("blockquote", {}, inline(block.text));
  return el("p", {}, inline(block.text));
}

function drawCode({ language, text }) {
  const copy = el("button", { type: "button", class: "link" }, "Copy");
  copy.addEventListener("click", () => copyText(text, copy));
  return el("figure", { class: "code" }, el("figcaption", {}, el("span", {}, language || "code"), copy), el("pre", { tabindex: "0" }, el("code", {}, text)));
}

function drawList(rows) {
  const root = el("div", {});
  const open = [{ indent: -1, node: root }];
  let item = root;
  for (const row of rows) {
    const found = ITEM.exec(row);
    if (!found) {
      item.append(" ", inline(row.trim()));
      continue;
    }
    const [, space, mark, text] = found;
    while (open.length > 1 && space.length < open.at(-1).indent) open.pop();
    if (space.length > open.at(-1).indent) {
      const isOrdered = /\d/.test(mark);
      const list = el(isOrdered ? "ol" : "ul", isOrdered ? { start: parseInt(mark, 10) } : {});
      item.append(list);
      open.push({ indent: space.length, node: list });
    }
    item = el("li", {}, inline(text));
    open.at(-1).node.append(item);
  }
  return root.firstChild;
}

// The first alternative that fits at the leftmost place wins: code before links before emphasis. What begins
// otherwise than with http:// or https:// is no link.
const INLINE = /(?<!`)(`{1,3})(?!`)(.{1,2000}?)(?<!`)\1(?!`)|\[([^\]\n]{1,300})\]\((https?:\/\/[^\s()<>]{1,2000})\)|(https?:\/\/[^\s<>()"']{1,2000}[^\s<>()"'.,;:!?])|\*\*(?=[^\s*])(.{1,2000}?)\*\*|\*(?=[^\s*])([^*\n]{1,2000}?)\*(?!\*)/s;

export function inline(text) {
  const fragment = document.createDocumentFragment();
  let rest = text;
  for (let found = INLINE.exec(rest); found; found = INLINE.exec(rest)) {
    const [whole, , code, label, target, address, strong, light] = found;
    fragment.append(rest.slice(0, found.index));
    if (code !== undefined) fragment.append(el("code", {}, code));
    else if (target !== undefined) fragment.append(link(target, label));
    else if (address !== undefined) fragment.append(link(address, address));
    else if (strong !== undefined) fragment.append(el("strong", {}, inline(strong)));
    else fragment.append(el("em", {}, inline(light)));
    rest = rest.slice(found.index + whole.length);
  }
  fragment.append(rest);
  return fragment;
}

function link(address, label) {
  if (!URL.canParse(address)) return document.createTextNode(label);
  const { href } = new URL(address);
  return el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href }, label);
}

export async function copyText(text, from) {
  const before = from.textContent;
  try {
    await navigator.clipboard.writeText(text);
    from.textContent = "Copied";
  } catch {
    from.textContent = "Not allowed"; // a page without https may not write the clipboard
  }
  setTimeout(() => { from.textContent = before; }, 1500);
}
