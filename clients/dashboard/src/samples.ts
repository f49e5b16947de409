// What the policies said: a list to search and filter, and one episode token by token.
import { exportAddress, sample, samples, search, type Content, type Sample, type SampleQuery, type Status } from "./api";
import { append, code, el, empty, fill, plain, table } from "./dom";
import { ago, count, figure, moment, number } from "./format";
import { words } from "./words";
import type { Refused } from "./view";

interface Tab {
  draw: (status: Status) => void;
  load: (status: Status) => Promise<void>;
  close: () => void;
}

const PAGE = 50;
const DEEPEST = Math.log(2);
const DEEPEST_ALONE = 3;
const SHADES = 5;

const field = (label: string, control: HTMLElement): HTMLElement => el("label.field", {}, el("span", {}, label), control);
const input = (name: string, attributes: Record<string, string | number> = {}): HTMLInputElement =>
  el("input", { name, autocomplete: "off", ...attributes }) as HTMLInputElement;

const NO_ARCHIVE = [
  "With ", code("dataflow: {archive: {}}"), " in its recipe a run keeps what was trained on and what was dropped (docs/archive.md); ",
  "the server needs ", code("pip install 'astraflow[archive]'"), ".",
];

/** A list of samples with its filters. */
export function samplesView(body: HTMLElement, run_id: string, refused: Refused): Tab {
  const policy = el("select", { name: "policy_id" }, el("option", { value: "" }, "all")) as HTMLSelectElement;
  const reason = el("select", { name: "reason" }, el("option", { value: "" }, "all"), el("option", { value: "trained" }, "trained")) as HTMLSelectElement;
  const form = el("form.filters.card", { "aria-label": "Filters" },
    field("Text", input("text", { type: "search", placeholder: "what was said", maxlength: 200 })),
    field("Policy", policy), field("Role", input("role", { size: 8 })), field("Reason", reason),
    field("Reward ≥", input("min_reward", { type: "number", step: "any", size: 6 })), field("Reward ≤", input("max_reward", { type: "number", step: "any", size: 6 })),
    field("Tokens ≥", input("min_tokens", { type: "number", min: 0 })), field("Tokens ≤", input("max_tokens", { type: "number", min: 0 })),
    field("Step ≥", input("min_step", { type: "number", min: 0 })), field("Step ≤", input("max_step", { type: "number", min: 0 })),
    field("Version", input("version", { type: "number", min: 0 })), field("Source", input("source", { size: 10 })), field("Task", input("task_id", { size: 14 })),
    el("div.buttons", {}, el("button", { type: "submit" }, "Find"), el("button.quiet", { type: "reset" }, "Clear")));
  const exports = el("div.exports");
  const place = el("div", { "aria-live": "polite" });
  const more = el("button", { type: "button" }, "Show more");
  append(body, [el("h2", {}, "Samples", el("span.about", {}, "What did the policies say?")), form, exports, place, more]);
  more.hidden = true;
  let found: Sample[] = [];
  let next = "";
  let filled = false;

  const values = (): Record<string, string> => Object.fromEntries([...new FormData(form as HTMLFormElement)].map(([key, value]) => [key, String(value).trim()]));
  const query = (): SampleQuery => {
    const given = values();
    const asked: SampleQuery = { run_id, page_size: PAGE };
    for (const name of ["policy_id", "role", "source", "task_id"]) if (given[name]) asked[name] = given[name];
    for (const name of ["min_reward", "max_reward", "min_tokens", "max_tokens", "min_step", "max_step", "version"]) if (given[name]) asked[name] = Number(given[name]);
    if (given.reason) asked.reasons = [given.reason];
    return asked;
  };

  const look = async (page_token: string): Promise<void> => {
    const { text } = values();
    const asked = { ...query(), page_token };
    if (!page_token) fill(place, el("p.empty", {}, text ? "Reading samples …" : "Loading …"));
    try {
      const sought = text ? await search(asked, text) : null;
      const page = sought ?? (await samples(asked));
      found = [...(page_token ? found : []), ...page.samples];
      next = page.next_page_token;
      paint(sought ? `${count(sought.searched)} samples were read for this text. ${sought.no_texts}` : null);
    } catch (error) {
      more.hidden = true;
      fill(place, told(error, run_id, refused));
    }
  };

  const paint = (searched: string | null): void => {
    more.hidden = !next;
    fill(exports, "Export what the filters find: ",
      ...(["jsonl", "parquet"] as const).map((format) => el("a.button.quiet", { href: exportAddress(query(), values().text ?? "", format), download: `samples.${format}` }, format === "jsonl" ? "JSONL" : "Parquet")));
    if (found.length === 0) {
      fill(place, empty(next ? "None on the pages that were read." : "The archive has no such sample (yet).",
        searched ?? "A sample is written when a durable checkpoint covers its step, or when it is dropped. Fewer filters find more."));
      return;
    }
    fill(place, el("div.card", {}, table("Samples", [
      { head: "Step", number: true, cell: (each) => count(each.step) },
      { head: "Sample", cell: (each) => el("a.id", { href: `#/run/${encodeURIComponent(run_id)}/sample/${encodeURIComponent(each.sample_id)}` }, each.item.trajectory_id || each.sample_id) },
      { head: "Reason", cell: (each) => el(`span.badge.${each.reason === "trained" ? "active" : "dropped"}`, {}, words(each.reason)) },
      { head: "Reward", number: true, cell: (each) => figure(each.item.reward, "") },
      { head: "Tokens", number: true, title: "All, of these trained on", cell: (each) => `${count(each.item.num_tokens)} · ${count(each.item.num_trainable_tokens)}${each.item.truncated ? " ✂" : ""}` },
      { head: "Versions", number: true, cell: (each) => versionsOf(each.item, "–") },
      { head: "Role", cell: (each) => each.item.role || each.policy_id },
      { head: "Source", cell: (each) => each.item.source },
      { head: "Task", cell: (each) => el("span.id", {}, each.item.task_id) },
      ...(searched === null ? [] : [{ head: "Text", cell: (each: Sample) => el("span.detail", {}, each.excerpt ?? "") }]),
      { head: "Ended", cell: (each) => ago(each.end_time) },
    ], found)), searched !== null ? el("p.muted", {}, `${searched} “Show more” reads on.`) : null);
  };

  form.addEventListener("submit", (event) => { event.preventDefault(); void look(""); });
  form.addEventListener("reset", () => window.setTimeout(() => void look(""), 0));
  more.addEventListener("click", () => void look(next));

  return {
    draw: (status) => {
      if (filled) return;
      filled = true;
      append(policy, status.policies.map((each) => el("option", { value: each.policy_id }, each.policy_id)));
      append(reason, Object.keys(status.trajectories.dropped).sort().map((each) => el("option", { value: each }, words(each))));
    },
    load: async () => { if (found.length === 0) await look(""); },
    close: () => {},
  };
}

type Colouring = "difference" | "engine" | "mask" | "version";

/** One sample: facts, its turns, and each token. */
export function sampleView(body: HTMLElement, run_id: string, sample_id: string, refused: Refused): Tab {
  let loaded = false;
  return {
    draw: () => {},
    load: async () => {
      if (loaded) return;
      loaded = true;
      try {
        const content = await sample(run_id, sample_id);
        const group = await samples({ run_id, task_id: content.item.task_id, policy_id: content.policy_id, page_size: 200 })
          .catch(() => ({ samples: [] as Sample[] }));
        fill(body, ...shown(run_id, content, group.samples));
      } catch (error) {
        loaded = false;
        fill(body, told(error, run_id, refused));
      }
    },
    close: () => {},
  };
}

function told(error: unknown, run_id: string, refused: Refused): HTMLElement {
  const { slug, message } = error as { slug?: string; message: string };
  if (slug === "FAILED_PRECONDITION") return empty(message, ...NO_ARCHIVE);
  if (slug !== "NOT_FOUND") return refused(error);
  return empty("There is no such sample.", `${message}: `, el("a", { href: `#/run/${encodeURIComponent(run_id)}/samples` }, "see the samples"), ".");
}

const versionsOf = ({ min_version: first, max_version: last }: Sample["item"], to: string): string => (first === last ? String(first) : `${first}${to}${last}`);

function shown(run_id: string, content: Content, ofTask: Sample[]): HTMLElement[] {
  const group = ofTask.filter((each) => each.item.group_id === content.item.group_id);
  const mean = group.reduce((sum, each) => sum + each.item.reward, 0) / Math.max(1, group.length);
  const compares = content.trainer_logprobs !== null;
  const tokens = new Tokens(content);
  const kinds: [Colouring, string][] = [["difference", "trainer − engine"], ["engine", "engine's log-prob"], ["mask", "loss mask"], ["version", "weight version"]];
  const choose = el("fieldset.colouring", {}, el("legend", {}, "Colour tokens by"), ...kinds.map(([kind, title]) =>
    el("label.choice", {}, el("input", { type: "radio", name: "colouring", value: kind, checked: kind === (compares ? "difference" : "engine"), disabled: kind === "difference" && !compares, change: () => tokens.colour(kind) }), title)));
  tokens.colour(compares ? "difference" : "engine");
  const facts: [string, string][] = [
    ["Policy", content.policy_id], ["Role", content.item.role || content.policy_id], ["Step", count(content.step)],
    ["Reward", figure(content.item.reward, "")],
    ["Advantage in its group", group.length > 1 ? `${figure(content.item.reward - mean, "")} over the mean of ${group.length}` : "its group has no other sample here"],
    ["Tokens", `${count(content.item.num_tokens)}, of which ${count(content.item.num_trainable_tokens)} are trained on${content.item.truncated ? "; cut off by a limit" : ""}`],
    ["Versions", versionsOf(content.item, " to ")], ["Source", content.item.source || "–"], ["Task", content.item.task_id],
    ["Episode", content.episode_id], ["Node", content.item.node_id || "–"], ["Batch", content.batch_id || "–"], ["Ended", moment(content.end_time)],
  ];
  return [
    el("h2", {}, el("a", { href: `#/run/${encodeURIComponent(run_id)}/samples` }, "Samples"), " › ", el("span.id", {}, content.item.trajectory_id || content.sample_id),
      " ", el(`span.badge.${content.reason === "trained" ? "active" : "dropped"}`, {}, words(content.reason))),
    el("dl.facts.card", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    el("div.card", {}, choose,
      compares ? el("p.help", {}, "Red where the trainer found a token less likely than the engine, blue where more; deepest from a ratio of 2 on. Tokens that are not trained on are dim.")
        : el("p.help", {}, "The trainer's log-probs are not kept (dataflow.archive.trainer_logprobs); redder tokens were less likely to the engine. Tokens that are not trained on are dim."),
      content.no_texts ? el("p.help", {}, content.no_texts) : null,
      tokens.detail, tokens.element),
    el("div.card", {}, el("h3", {}, "The same task"), ofTask.length > 1 ? table("Samples of the same task", [
      { head: "Sample", cell: (each) => each.sample_id === content.sample_id ? el("strong", {}, "this one") : el("a.id", { href: `#/run/${encodeURIComponent(run_id)}/sample/${encodeURIComponent(each.sample_id)}` }, each.item.trajectory_id) },
      { head: "Episode", number: true, cell: (each) => count(each.item.member) },
      { head: "Turn", number: true, cell: (each) => count(each.item.turn) },
      { head: "Reward", number: true, cell: (each) => figure(each.item.reward, "") },
      { head: "Tokens", number: true, cell: (each) => count(each.item.num_tokens) },
      { head: "Reason", cell: (each) => words(each.reason) },
    ], ofTask) : el("p.calm", {}, "The archive has no other sample of this task.")),
  ];
}

interface Turn { role: string; start: number; end: number; reward: number }

/** The turns of a sample; what no turn covers is told apart by whether it was sampled. */
function turnsOf(content: Content): Turn[] {
  const length = content.token_ids.length;
  const given = [...content.turn_spans].sort((a, b) => a.start - b.start);
  const turns: Turn[] = [];
  let at = 0;
  const between = (end: number): void => {
    while (at < end) {
      const sampled = content.loss_mask[at] ?? false;
      let stop = at;
      while (stop < end && (content.loss_mask[stop] ?? false) === sampled) stop += 1;
      turns.push({ role: sampled ? "sampled" : "context", start: at, end: stop, reward: 0 });
      at = stop;
    }
  };
  for (const span of given) {
    between(span.start);
    turns.push(span);
    at = span.end;
  }
  between(length);
  return turns;
}

/** Tokens as text that is coloured, walked by arrow keys, and told one by one. */
class Tokens {
  readonly element = el("div.turns", { tabindex: 0, role: "group", "aria-label": "Tokens; arrow keys walk through them", "aria-describedby": "token-detail" });
  readonly detail = el("p.tokendetail", { id: "token-detail", role: "status" }, "Point at a token, or press an arrow key in the text, to see its figures.");
  private readonly spans: HTMLElement[] = [];
  private readonly versions: (number | null)[];
  private current = -1;

  constructor(private readonly content: Content) {
    this.versions = content.token_ids.map(() => null);
    for (const [start, end, version] of content.version_spans) this.versions.fill(version, start, end);
    const oldest = Math.min(...content.version_spans.map((span) => span[2]));
    let before: number | null = null;
    for (const turn of turnsOf(content)) {
      const text = el("div.text");
      for (let index = turn.start; index < turn.end; index += 1) {
        const version = this.versions[index] ?? null;
        if (version !== null && version !== before) {
          text.append(el(`span.version.version-${Math.min(5, version - oldest)}`, { title: `From here on sampled by version ${version}` }, `v${version}`));
          before = version;
        }
        const span = el("span", { "data-index": index }, content.texts ? (content.texts[index] ?? "") : `${content.token_ids[index]} `);
        this.spans.push(span);
        text.append(span);
      }
      const reward = turn.reward ? `, reward ${figure(turn.reward, "")}` : "";
      this.element.append(el(`article.turn.${/^[a-z]+$/.test(turn.role) ? turn.role : "other"}`, {},
        el("h3", {}, turn.role || "turn", el("span.muted", {}, ` ${count(turn.end - turn.start)} ${turn.end - turn.start === 1 ? "token" : "tokens"}${reward}`)), text));
    }
    this.element.addEventListener("mouseover", (event) => this.point(event));
    this.element.addEventListener("click", (event) => this.point(event));
    this.element.addEventListener("keydown", (event) => this.walk(event));
  }

  colour(kind: Colouring): void {
    this.spans.forEach((span, index) => { span.className = `token ${this.shade(kind, index)}`; });
    this.spans[this.current]?.classList.add("current");
  }

  private shade(kind: Colouring, index: number): string {
    const { loss_mask, logprobs, trainer_logprobs } = this.content;
    const trained = loss_mask[index] ?? false;
    if (kind === "mask") return trained ? "blue-2" : "dim";
    if (!trained) return "dim";
    if (kind === "version") return `version-${Math.min(5, (this.versions[index] ?? 0) - Math.min(...this.content.version_spans.map((span) => span[2])))}`;
    const engine = logprobs[index] ?? 0;
    if (kind === "engine") return level("red", -engine / DEEPEST_ALONE);
    const trainer = trainer_logprobs?.[index];
    if (trainer === null || trainer === undefined) return "plain";
    const difference = trainer - engine;
    return level(difference < 0 ? "red" : "blue", Math.abs(difference) / DEEPEST);
  }

  private point(event: Event): void {
    const index = (event.target as HTMLElement).dataset.index;
    if (index !== undefined) this.tell(Number(index));
  }

  private walk(event: KeyboardEvent): void {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    this.tell(Math.max(0, Math.min(this.spans.length - 1, this.current + by)));
    this.spans[this.current]?.scrollIntoView({ block: "nearest" });
  }

  private tell(index: number): void {
    const { token_ids, texts, loss_mask, logprobs, trainer_logprobs } = this.content;
    this.spans[this.current]?.classList.remove("current");
    this.current = index;
    this.spans[index]?.classList.add("current");
    const engine = logprobs[index] ?? 0;
    const trainer = trainer_logprobs?.[index] ?? null;
    const trained = loss_mask[index] ?? false;
    const parts = [`token ${index + 1} of ${token_ids.length}`, `id ${token_ids[index]}`];
    if (texts) parts.push(JSON.stringify(texts[index]));
    if (!trained) parts.push("not trained on");
    else parts.push(`engine ${number(engine, 4)}`);
    if (trained && trainer !== null) parts.push(`trainer ${number(trainer, 4)}`, `difference ${number(trainer - engine, 3)}`);
    const version = this.versions[index];
    if (version !== null && version !== undefined) parts.push(`version ${version}`);
    this.detail.textContent = plain(parts.join(" · "));
  }
}

const level = (hue: "red" | "blue", share: number): string => {
  const step = Math.min(SHADES, Math.round(share * SHADES));
  return step <= 0 ? "plain" : `${hue}-${step}`;
};
