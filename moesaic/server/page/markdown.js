// Markdown as DOM nodes. Text only ever becomes text nodes: no part of it is read as HTML.
//
// A subset that models write: headings, paragraphs, lists, quotes, fences, tables, rules; code, bold,
// italics, strike-through and links within a line. A blank line ends every block but a fence, so
// finished blocks of a stream never change.

import { html } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:-[ \t]*){3,}$|^ {0,3}(?:\*[ \t]*){3,}$|^ {0,3}(?:_[ \t]*){3,}$/;
const ITEM = /^(\s*)(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
// It is tested on a line without spaces around it, and no two parts of it match the same text.
const DIVIDER = /^(?:\|\s*)?:?-+:?(?:\s*\|\s*:?-+:?)*(?:\s*\|)?$/;
const LINK = /^(!?)\[([^[\]]*)\]\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/;
const ADDRESS = /^https?:\/\//i;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const PLAIN = /^[^\\`*_~[!]+/;
const WORD = /[\p{L}\p{N}]/u;
const DEEPEST = 6;

// A view of a text that grows.
export class Markdown {
  constructor(root) {
    this.root = root;
    this.text = "";
    this.begin = 0; // of the blocks that may still change
    this.open = [];
  }

  append(text) {
    this.text += text;
    this.pending ??= requestAnimationFrame(() => this.render());
  }

  render() {
    if (this.pending) cancelAnimationFrame(this.pending);
    this.pending = null;
    const end = finished(this.text, this.begin);
    for (const node of this.open) node.remove();
    this.root.append(...blocks(this.text.slice(this.begin, end).split("\n")));
    this.open = blocks(this.text.slice(end).split("\n"));
    this.root.append(...this.open);
    this.begin = end;
  }
}

// Where the last finished block ends: after a blank line outside of a fence.
function finished(text, begin) {
  let fence = null;
  let end = begin;
  for (let at = begin, next; (next = text.indexOf("\n", at) + 1) > 0; at = next) {
    const line = text.slice(at, next - 1);
    if (fence) fence = closes(line, fence) ? null : fence;
    else fence = FENCE.exec(line)?.[1] ?? null;
    if (!fence && !line.trim()) end = next;
  }
  return end;
}

const closes = (line, fence) => new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}\\s*$`).test(line);

function blocks(lines, depth = 0) {
  const made = [];
  for (let at = 0; at < lines.length;) {
    const [block, next] = depth > DEEPEST ? paragraph(lines, at, depth) : oneBlock(lines, at, depth);
    if (block) made.push(block);
    at = next;
  }
  return made;
}

// The block that begins with a line, and the index of the line after it.
function oneBlock(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  if (FENCE.test(line)) return fence(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return [html(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2])), at + 1];
  if (RULE.test(line)) return [html("hr"), at + 1];
  if (isTable(lines, at)) return table(lines, at);
  if (QUOTE.test(line)) return quote(lines, at, depth);
  if (ITEM.test(line)) return list(lines, at, depth);
  return paragraph(lines, at, depth);
}

function fence(lines, at) {
  const [, mark, language] = FENCE.exec(lines[at]);
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], mark)) end += 1;
  const code = html("code", { textContent: lines.slice(at + 1, end).join("\n") });
  const box = html("pre", { tabIndex: 0 }, code);
  box.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  return [box, end + 1];
}

const isTable = (lines, at) => lines[at].includes("|") && at + 1 < lines.length
  && lines[at + 1].includes("|") && DIVIDER.test(lines[at + 1].trim());

function table(lines, at) {
  const sides = cells(lines[at + 1]).map((text) => (text.endsWith(":") ? (text.startsWith(":") ? "center" : "right") : ""));
  const row = (line, name) => html("tr", {}, ...cells(line).map((text, index) => {
    const cell = html(name, {}, ...inline(text));
    if (sides[index]) cell.className = sides[index];
    return cell;
  }));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const body = html("tbody", {}, ...lines.slice(at + 2, end).map((line) => row(line, "td")));
  const made = html("table", {}, html("thead", {}, row(lines[at], "th")), body);
  return [html("div", { className: "scroll", tabIndex: 0 }, made), end];
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => QUOTE.exec(line)[1]);
  return [html("blockquote", {}, ...blocks(inner, depth + 1)), end];
}

// Items of one indentation; deeper lines belong to the item above them.
function list(lines, at, depth) {
  const [, indent, bullet, number] = ITEM.exec(lines[at]);
  const made = html(bullet ? "ul" : "ol");
  if (number && number !== "1") made.start = Number(number);
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > indent.length || Boolean(item[2]) !== Boolean(bullet)) break;
    const inner = [item[4]];
    for (end += 1; end < lines.length && belongs(lines[end], indent.length); end += 1) inner.push(lines[end].trimEnd());
    made.append(html("li", {}, ...itemContent(inner, depth)));
  }
  return [made, end];
}

function belongs(line, indent) {
  return line.trim() !== "" && /^\s*/.exec(line)[0].length > indent;
}

function itemContent(lines, depth) {
  const [first, ...rest] = lines;
  const indent = Math.min(...rest.map((line) => /^\s*/.exec(line)[0].length));
  return [...inline(first), ...blocks(rest.map((line) => line.slice(indent)), depth + 1)];
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && (depth > DEEPEST || !interrupts(lines, end))) end += 1;
  return [html("p", {}, ...inline(lines.slice(at, end).join("\n"))), end];
}

const interrupts = (lines, at) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(lines[at])) || isTable(lines, at);

// `missing`: marks that do not occur again, so that they are searched for once only.
function inline(text, depth = 0) {
  const nodes = [];
  const missing = new Set();
  let plain = "";
  for (let at = 0; at < text.length;) {
    const [node, length] = depth > DEEPEST ? [null, 0] : span(text, at, depth, missing);
    if (node) {
      if (plain) nodes.push(plain);
      nodes.push(node);
      plain = "";
    } else {
      plain += text.slice(at, at + Math.max(1, length)).replace(/^\\(?=[!-/:-@[-`{-~])/, "");
    }
    at += Math.max(1, length);
  }
  return plain ? [...nodes, plain] : nodes;
}

// A node and the length of its source, or the length of text that is none.
function span(text, at, depth, missing) {
  const ordinary = PLAIN.exec(text.slice(at, at + 400));
  if (ordinary) return [null, ordinary[0].length];
  if (text[at] === "\\") return [null, 2];
  if (text[at] === "`") return code(text, at, missing);
  if (text[at] === "[" || text[at] === "!") return link(text, at, depth);
  return emphasis(text, at, depth, missing);
}

function code(text, at, missing) {
  const mark = /^`+/.exec(text.slice(at, at + 100))[0];
  const end = find(text, mark, at + mark.length, missing);
  if (end < 0) return [null, mark.length];
  const content = text.slice(at + mark.length, end).replace(/^ (.*[^ ].*) $/s, "$1");
  return [html("code", { textContent: content }), end + mark.length - at];
}

function link(text, at, depth) {
  const found = LINK.exec(text.slice(at, at + 2000));
  if (!found) return [null, 1];
  const [source, image, label, address] = found;
  const content = label ? inline(label, depth + 1) : [address];
  if (!ADDRESS.test(address)) return [html("span", { title: address }, ...content), source.length];
  const anchor = html("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, ...content);
  if (image) anchor.prepend("image: ");
  return [anchor, source.length];
}

function emphasis(text, at, depth, missing) {
  const [mark, name] = MARKS.find(([one]) => text.startsWith(one, at)) ?? [text[at], ""];
  const begin = at + mark.length;
  if (!name || !opens(text, at, begin, mark)) return [null, mark.length];
  let end = find(text, mark, begin + 1, missing);
  while (end >= 0 && !ends(text, end, mark)) end = find(text, mark, end + mark.length, missing);
  if (end < 0) return [null, mark.length];
  while (text[end + mark.length] === mark[0]) end += 1; // ***a** b*
  return [html(name, {}, ...inline(text.slice(begin, end), depth + 1)), end + mark.length - at];
}

// `2 * 3` and `snake_case` have no emphasis.
function opens(text, at, begin, mark) {
  if (!text[begin] || /\s/.test(text[begin])) return false;
  return mark[0] !== "_" || at === 0 || !WORD.test(text[at - 1]);
}

function ends(text, end, mark) {
  if (/\s/.test(text[end - 1])) return false;
  if (mark.length === 1 && (text[end - 1] === mark || text[end + 1] === mark)) return false;
  return mark[0] !== "_" || !text[end + mark.length] || !WORD.test(text[end + mark.length]);
}

function find(text, mark, from, missing) {
  if (missing.has(mark)) return -1;
  const end = text.indexOf(mark, from);
  if (end < 0) missing.add(mark);
  return end;
}
