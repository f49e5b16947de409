// Elements in a few letters. Text is only ever set as text, never as markup: what a model wrote cannot act on the page.

export type Child = Node | string | number | null | undefined | false;
type Attributes = Record<string, string | number | boolean | undefined | ((event: Event) => void)>;

/** An element `tag.class.class` with attributes (functions become listeners) and children. */
export function el(kind: string, attributes: Attributes = {}, ...children: Child[]): HTMLElement {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== undefined && value !== false) element.setAttribute(name, plain(String(value)));
  }
  append(element, children);
  return element;
}

/** Text of others without what would turn it around or break its line. */
export function plain(text: string): string {
  return text.replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u0080-\u009f]/g, "\ufffd").replace(/[\u2028\u2029]/g, "\u2424");
}

export function append(parent: Node, children: Child[]): void {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    parent.appendChild(typeof child === "object" ? child : document.createTextNode(plain(String(child))));
  }
}

/** Replaces what an element holds. */
export function fill(parent: Element, ...children: Child[]): void {
  parent.replaceChildren();
  append(parent, children);
}

export interface Column<Row> {
  head: string;
  cell: (row: Row) => Child;
  number?: boolean;
  title?: string;
}

/** A table with a caption; it scrolls by itself where it is wider than the screen. */
export function table<Row>(caption: string, columns: Column<Row>[], rows: Row[]): HTMLElement {
  const head = el(
    "tr",
    {},
    ...columns.map((column) => el(column.number ? "th.number" : "th", { scope: "col", title: column.title }, column.head)),
  );
  const body = rows.map((row) =>
    el("tr", {}, ...columns.map((column) => el(column.number ? "td.number" : "td", {}, column.cell(row)))),
  );
  return el(
    "div.scroll",
    { role: "region", "aria-label": caption, tabindex: 0 },
    el("table", {}, el("caption.hidden", {}, caption), el("thead", {}, head), el("tbody", {}, ...body)),
  );
}

/** Words where there is nothing to show: what is missing, and how to get it. */
export function empty(what: string, ...how: Child[]): HTMLElement {
  return el("div.empty", {}, el("p.what", {}, what), how.length ? el("p", {}, ...how) : null);
}

export const code = (text: string): HTMLElement => el("code", {}, text);
