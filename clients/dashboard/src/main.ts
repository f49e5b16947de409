// The page: which view an address shows, who reads, and what is said when the server refuses.
import "uplot/dist/uPlot.min.css";
import "./app.css";
import { Refusal, session } from "./api";
import { code, el, fill, type Child } from "./dom";
import { compareView } from "./compare";
import { runView } from "./run";
import { runsView } from "./runs";
import { recolour } from "./theme";
import type { View } from "./view";

const top = document.getElementById("top") as HTMLElement;
const content = document.getElementById("content") as HTMLElement;
let view: View | null = null;
let reader = "";

type Theme = "auto" | "light" | "dark";
const THEMES: Theme[] = ["auto", "light", "dark"];

function theme(): Theme {
  const kept = localStorage.getItem("theme");
  return THEMES.find((each) => each === kept) ?? "auto";
}

function wear(chosen: Theme): void {
  localStorage.setItem("theme", chosen);
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  recolour();
}

function header(): void {
  const button = el("button.quiet", { type: "button", click: () => {
    const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length] ?? "auto";
    wear(next);
    button.textContent = `Colours: ${next}`;
  } }, `Colours: ${theme()}`);
  const leave = reader && reader !== "anonymous"
    ? el("form", { method: "post", action: "/logout" }, el("button.quiet", { type: "submit", title: `Signed in as ${reader}` }, "Sign out"))
    : null;
  fill(
    top,
    el("a.brand", { href: "#/" }, "AstraFlow"),
    el("nav", { "aria-label": "Main" }, el("a", { href: "#/" }, "Runs"), el("a", { href: "#/compare" }, "Compare")),
    el("div.tools", {}, button, leave),
  );
}

/** Asks for a token. It goes to the server in a form and stays in a cookie that no script reads. */
function signIn(why: string): HTMLElement {
  const field = el("input", { type: "password", name: "token", id: "token", required: true, autocomplete: "off", spellcheck: "false" });
  const said = el("p.refused", { role: "alert" }, why);
  const form = el(
    "form.card.signin",
    {},
    el("h1", {}, "Sign in"),
    el("p", {}, "This server asks for a token of a viewer or an operator. An operator makes one with ",
      code("astraflow token create --role viewer --run RUN"), "."),
    el("label", { for: "token" }, "Token"),
    field,
    said,
    el("button", { type: "submit" }, "Sign in"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const body = new URLSearchParams({ token: (field as HTMLInputElement).value });
    fetch("/login", { method: "POST", body, redirect: "manual" })
      .then(async (answer) => {
        if (answer.type === "opaqueredirect") await start();
        else said.textContent = ((await answer.json()) as { message: string }).message;
      })
      .catch(() => { said.textContent = "The server does not answer; try again."; });
  });
  window.setTimeout(() => field.focus(), 0);
  return form;
}

/** Says what a refusal means here, and what would help. */
export function refused(error: unknown): HTMLElement {
  if (!(error instanceof Refusal)) throw error;
  if (error.status === 401) return signIn(error.why === "missing" ? "" : error.message);
  if (error.status === 403) {
    return told("Your token is not for this.", error.message, " Ask an operator for a token of this run, then sign out and in.");
  }
  if (error.status === 404) {
    return told("There is no such run here.", `${error.message}. It was deleted, or is on another server: `, el("a", { href: "#/" }, "see the runs"), ".");
  }
  return told(error.status === 400 ? "This cannot be asked." : "The server cannot answer this now.", error.message);
}

const told = (what: string, ...how: Child[]): HTMLElement => el("div.empty", {}, el("h1.what", {}, what), el("p", {}, ...how));

function route(): View {
  const [kind = "", name = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  if (kind === "run" && name) return runView(content, name, rest, refused);
  if (kind === "compare") return compareView(content, name ? name.split(",") : [], refused);
  return runsView(content, refused);
}

function show(): void {
  view?.close();
  content.replaceChildren(el("p.empty", {}, "Loading …"));
  view = route();
  for (const link of top.querySelectorAll("nav a")) {
    const here = link.getAttribute("href") === (location.hash.startsWith("#/compare") ? "#/compare" : "#/");
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function moved(): void {
  const [kind = "", name = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  if (!(kind === "run" && view?.go?.(name, rest))) show();
}

async function start(): Promise<void> {
  try {
    reader = (await session()).subject;
    header();
    show();
  } catch (error) {
    header();
    fill(content, refused(error));
    if ((error as Refusal).status !== 401) window.setTimeout(() => void start(), 3000);
  }
}

wear(theme());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
window.addEventListener("hashchange", moved);
void start();
