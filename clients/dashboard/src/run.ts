// One run: what it waits for on top, then one tab of figures at a time, live.
import { events, Refusal, status as statusOf, steps, versions, Watch, type NodeStatus, type Policy, type RunEvent, type Status, type Version } from "./api";
import { Chart, type Drawing } from "./charts";
import { append, code, el, empty, fill, table } from "./dom";
import { ago, bytes, clock, count, figure, moment, number, percent, seconds } from "./format";
import { DATA_PLANE, drawing, GROUPS, needed, type Curve, type Group, type OfPolicy } from "./groups";
import { sampleView, samplesView } from "./samples";
import { drop, keep } from "./theme";
import { happened, stage, stateBadge, weight, words } from "./words";
import type { Refused, View } from "./view";

const POINTS = 500;
const AT_ONCE_MS = 1500;
const MAX_MAPPED = 200;

const TABS: [string, string][] = [
  ["progress", "Progress"], ["stability", "Stability"], ["freshness", "Freshness"], ["shape", "Shape"],
  ["throughput", "Throughput"], ["trainer", "Trainer"], ["weights", "Weights"], ["data", "Data plane"],
  ["policies", "Policies"], ["timeline", "Timeline"], ["samples", "Samples"],
];

/** What a tab shows; `draw` is called with each new status, `load` when steps were finished. */
interface Tab {
  draw: (status: Status) => void;
  load: (status: Status) => Promise<void>;
  close: () => void;
}

export function runView(content: HTMLElement, run_id: string, rest: string[], refused: Refused): View {
  const head = el("div.runhead");
  const trouble = el("p.trouble", { role: "status" });
  const why = el("section.why", { "aria-label": "What the run waits for" });
  const tabs = el("nav.tabs", { "aria-label": "Figures" });
  const body = el("section.body", { "aria-label": "Figures of the run" });
  let last: Status | null = null;
  let tab: Tab | null = null;
  let shown = "";
  let at = rest;
  let steps_done = "";
  let timer = 0;
  let broken = false;
  let closed = false;
  trouble.hidden = true;
  document.title = `${run_id} · AstraFlow`;

  /** What a server that is away did not give is asked for again once it answers. */
  const fail = (error: unknown): void => {
    if (closed) return;
    broken = error instanceof Refusal && [0, 503].includes(error.status);
    fill(body, refused(error));
  };

  const reload = (): void => {
    if (timer || closed) return;
    timer = window.setTimeout(() => {
      timer = 0;
      if (last && tab) tab.load(last).catch(fail);
    }, AT_ONCE_MS);
  };

  const open = (path: string[]): void => {
    const name = path[0] === "sample" ? "samples" : path[0] || "progress";
    const key = path.join("/");
    if (key === shown && tab && !broken) return;
    tab?.close();
    [shown, at, broken] = [key, path, false];
    fill(tabs, ...TABS.map(([id, title]) =>
      el("a", { href: `#/run/${encodeURIComponent(run_id)}/${id}`, "aria-current": id === name ? "page" : undefined }, title)));
    fill(body);
    tab = path[0] === "sample" ? sampleView(body, run_id, path[1] ?? "", refused) : tabOf(name, body, run_id, refused);
    tabs.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
    if (last) {
      tab.draw(last);
      tab.load(last).catch(fail);
    }
  };

  const watch = new Watch(run_id, {
    status: (status) => {
      if (closed) return;
      const first = last === null;
      last = status;
      drawHead(head, status);
      drawWhy(why, status);
      if (first) fill(content, head, trouble, why, tabs, body);
      if (first || broken) open(at);
      tab?.draw(status);
      const done = status.policies.map((policy) => policy.last_finished_step).join(" ");
      if (done !== steps_done && !first) reload();
      steps_done = done;
    },
    trouble: (text) => {
      if (closed) return;
      trouble.textContent = text;
      trouble.hidden = text === "";
      if (last === null && text) void explain();
    },
    refused: () => { if (last !== null) void explain(); },
  });

  /** Why there is no stream. What only the reader can mend takes the place of the figures, and is not asked for again. */
  async function explain(): Promise<void> {
    try {
      await statusOf(run_id);
    } catch (error) {
      if (closed) return;
      const is_final = error instanceof Refusal && [401, 403, 404].includes(error.status);
      if (is_final) watch.close();
      if (is_final || last === null) fill(content, refused(error));
      else if (error instanceof Refusal && error.status) trouble.textContent = error.message;
      if (is_final) last = null;
    }
  }

  return {
    close: () => {
      closed = true;
      watch.close();
      tab?.close();
      window.clearTimeout(timer);
    },
    go: (name, path) => {
      if (name !== run_id || last === null) return false;
      open(path);
      return true;
    },
  };
}

const trained = (status: Status): Policy[] => status.policies.filter((policy) => !policy.frozen && !policy.external);

/** A figure; several are of one policy each, a line for each. */
function tile(name: string, value: string | string[], title: string, owners: string[] = []): HTMLElement {
  const values = typeof value === "string" ? [value] : value;
  const several = values.length > 1;
  return el("div.tile", { title }, el("dt", {}, name),
    ...values.map((each, index) => el(several ? "dd.one" : "dd", {}, several ? el("span.owner", {}, owners[index]) : null, each)),
    values.length === 0 ? el("dd", {}, "–") : null);
}

function drawHead(head: HTMLElement, status: Status): void {
  const policies = trained(status);
  const owners = policies.map((policy) => policy.policy_id);
  const each = (name: string, show: (policy: Policy) => string, title: string): HTMLElement => tile(name, policies.map(show), title, owners);
  const connected = status.nodes.filter((node) => node.connected);
  fill(
    head,
    el("div.heading", {}, el("h1", {}, status.run_id), stateBadge(status.state),
      el("span.read", {}, `as of ${clock(status.read_time)}`)),
    el("dl.tiles", {},
      each("Step", (policy) => count(policy.last_finished_step), "Last finished step of each policy"),
      each("Reward", (policy) => figure(policy.recent_training_reward, ""), "Mean of the groups completed last"),
      each("Version", (policy) => (policy.version ? count(policy.version.version) : "–"), "Newest weight version"),
      each("Staleness", (policy) => policy.staleness ? `${number(policy.staleness.p50)}, p99 ${number(policy.staleness.p99)}` : "–", "Median and 99th percentile in versions, of what was bound to batches"),
      tile("Trainer waits", status.balances.map((one) => percent(one.trainer_wait_share)), "Share of its time over the newest steps", status.balances.map((one) => one.policy_id)),
      tile("Nodes", `${count(connected.length)} of ${count(status.nodes.length)}`, "Connected, of those that ever joined"),
      tile("Sampling", `${number(connected.reduce((sum, node) => sum + node.tokens_per_s, 0))} tok/s`, "All engines together"),
    ),
  );
}

function drawWhy(why: HTMLElement, status: Status): void {
  const open = why.querySelector("details")?.open ?? false;
  const verdicts = status.balances.map((balance) => el(`p.verdict.${balance.verdict}`, {},
    status.balances.length > 1 ? el("strong", {}, `${balance.policy_id}: `) : null, balance.sentence));
  const waits = status.waits.map((wait) => el("li", {},
    el("strong", {}, `${stage(wait.stage)}${wait.policy_id ? ` of ${wait.policy_id}` : ""}`),
    ` waits ${seconds(wait.waited_s)} for `, el("em", {}, words(wait.reason)),
    wait.progress !== null ? ` (${percent(wait.progress)} done)` : "",
    `: ${wait.detail}`, wait.released_by ? el("span.remedy", {}, ` → ${wait.released_by}`) : null));
  const failures = status.failures.filter((each) => each.in_a_row > 0).slice(0, 3).map((each) => el("li.fault", {},
    el("strong", {}, `${count(each.count)} tasks failed`), ` with ${words(each.reason)}, ${count(each.in_a_row)} in a row: ${each.detail}`));
  const all = [...failures, ...waits];
  const list = all.length === 0
    ? el("p.calm", {}, "Nothing waits.")
    : el("details", { open: open || failures.length > 0 || status.balances.length === 0 }, el("summary", {}, `Why: ${all.length === 1 ? "one thing waits" : `${all.length} things wait`}`), el("ul", {}, ...all));
  fill(why, status.stopped_for ? el("p.trouble", {}, `The server stopped the run: ${status.stopped_for}`) : null, ...verdicts, list);
}

function tabOf(name: string, body: HTMLElement, run_id: string, refused: Refused): Tab {
  if (name === "samples") return samplesView(body, run_id, refused);
  if (name === "timeline") return timelineTab(body, run_id);
  if (name === "throughput") return throughputTab(body);
  if (name === "weights") return weightsTab(body, run_id);
  if (name === "policies") return policiesTab(body, run_id);
  if (name === "data") return dataTab(body, run_id);
  const group = GROUPS.find((each) => each.id === name) ?? (GROUPS[0] as Group);
  return curvesTab(body, run_id, group, group.id === "progress");
}

const NO_STEPS = "No step is finished yet. The first curve appears with the first step; above is what it waits for.";

/** Charts of a group; what each policy has is asked for once its names are known. */
function curvesTab(body: HTMLElement, run_id: string, group: Group, withHeldOut = false): Tab {
  const charts = new Map<string, Chart>();
  const grid = el("div.grid");
  const chooser = el("div.chooser");
  let chosen = "";
  let policies: OfPolicy[] = [];
  const make = (curve: Curve): Chart => keep(new Chart({ ...curve, group: run_id }));
  const heldOut = withHeldOut
    ? keep(new Chart({ title: "Held-out reward", unit: "", help: "Of complete evaluations on tasks that are not trained on.", xLabel: "version",
        missing: "No evaluation is complete yet; dataflow.evaluation in the recipe says how often there is one.", group: `${run_id} versions` }))
    : null;
  append(body, [el("h2", {}, group.title, el("span.about", {}, group.about)), chooser, grid]);
  for (const [index, curve] of group.curves.entries()) {
    const chart = make(curve);
    charts.set(curve.title, chart);
    grid.append(chart.element);
    if (index === 0 && heldOut) grid.append(heldOut.element);
  }
  const paint = (): void => {
    for (const curve of group.curves) charts.get(curve.title)?.draw(drawing(curve, policies, chosen));
  };
  const choose = (): void => {
    const several = policies.length > 1 && group.curves.some((curve) => typeof curve.lines === "function" || curve.lines.length > 1);
    const select = el("select", { id: "policy", change: (event) => { chosen = (event.target as HTMLSelectElement).value; paint(); } },
      ...policies.map((each) => el("option", { value: each.policy, selected: each.policy === chosen }, each.policy)));
    fill(chooser, ...(several ? [el("label", { for: "policy" }, "Charts of several curves show"), select] : []));
  };
  return {
    draw: (status) => heldOut?.draw(heldOutOf(status)),
    load: async (status) => {
      policies = await seriesOf(run_id, trained(status), group);
      if (!policies.some((each) => each.policy === chosen)) {
        chosen = policies[0]?.policy ?? "";
        choose();
      }
      body.querySelector(".nosteps")?.remove();
      if (policies.every((each) => each.steps.total === 0)) grid.before(el("p.empty.nosteps", {}, NO_STEPS));
      paint();
    },
    close: () => drop([...charts.values(), ...(heldOut ? [heldOut] : [])]),
  };
}

export async function seriesOf(run_id: string, policies: Policy[], group: Group, label = ""): Promise<OfPolicy[]> {
  return Promise.all(policies.map(async (policy, index) => {
    const names = (await steps(run_id, policy.policy_id, [], 1)).series.map((series) => series.name);
    const wanted = needed(group, names);
    const found = wanted.length
      ? await steps(run_id, policy.policy_id, wanted, POINTS)
      : { steps: [], finish_times: [], series: [], total: 0 };
    return { policy: policy.policy_id, label: label ? `${label} · ${policy.policy_id}` : policy.policy_id, colour: index, steps: found, names };
  }));
}

function heldOutOf(status: Status): Drawing {
  const done = status.evaluations.filter((each) => each.complete && each.mean_reward !== null);
  const x = [...new Set(done.map((each) => each.version))].sort((a, b) => a - b);
  const ids = [...new Set(done.map((each) => each.policy_id))];
  const lines = ids.map((id, colour) => ({
    label: id, colour, points: true,
    values: x.map((version) => done.findLast((each) => each.policy_id === id && each.version === version)?.mean_reward ?? null),
  }));
  return { x, lines };
}

const noNode = (what: string): HTMLElement => empty(what,
  "Start one: ", code("astraflow raas --join ADDRESS"), ", or ", code("--join-file FILE"), " with what ", code("astraflow join-token"), " printed, where tokens are on.");

function throughputTab(body: HTMLElement): Tab {
  const place = el("div");
  append(body, [el("h2", {}, "Throughput", el("span.about", {}, "What do the nodes do, by pool and region?")), place]);
  return {
    draw: (status) => {
      if (status.nodes.length === 0) {
        fill(place, noNode("No node has joined this run."));
        return;
      }
      fill(place, el("div.card", {}, el("h3", {}, "Pools"), table("Pools and regions", [
        { head: "Pool", cell: (row) => row.pool || "(none)" },
        { head: "Region", cell: (row) => row.region || "(none)" },
        { head: "Nodes", number: true, cell: (row) => `${row.connected} of ${row.nodes}` },
        { head: "Tokens/s", number: true, cell: (row) => number(row.tokens_per_s) },
        { head: "Busy", number: true, title: "Tasks held, of those that can be run at once", cell: (row) => `${count(row.leases)} of ${count(row.capacity)}` },
        { head: "Share", cell: (row) => meter(row.capacity ? row.leases / row.capacity : 0, "busy") },
        { head: "KV memory", number: true, cell: (row) => percent(row.kv) },
        { head: "Waiting sequences", number: true, cell: (row) => number(row.waiting) },
      ], pools(status))),
      el("div.card", {}, el("h3", {}, "Nodes"), table("Nodes", [
        { head: "Node", cell: (node) => el("span.id", {}, node.node_id) },
        { head: "State", cell: (node) => node.connected ? (node.drain_reason ? `draining: ${node.drain_reason}` : words(node.waiting_for) || "works") : `gone, seen ${ago(node.last_seen_time)}` },
        { head: "Tokens/s", number: true, cell: (node) => number(node.tokens_per_s) },
        { head: "Tasks", number: true, cell: (node) => `${count(node.leases)} of ${count(node.max_concurrent_tasks)}` },
        { head: "Episodes", number: true, cell: (node) => count(node.episodes) },
        { head: "Task takes", number: true, cell: (node) => seconds(node.task_s) },
        { head: "Restarts", number: true, title: "Of the node, and of its engines", cell: (node) => `${count(node.restarts)} · ${count(node.engine_restarts)}` },
        { head: "Machine", cell: (node) => node.hardware },
      ], status.nodes)));
    },
    load: async () => {},
    close: () => {},
  };
}

function meter(share: number, what: string): HTMLElement {
  const bar = el("span.meter", { role: "img", "aria-label": `${percent(share)} ${what}` }, el("span"));
  (bar.firstElementChild as HTMLElement).style.width = `${Math.min(100, Math.round(share * 100))}%`;
  return bar;
}

interface Pool { pool: string; region: string; nodes: number; connected: number; tokens_per_s: number; leases: number; capacity: number; kv: number | null; waiting: number }

function pools(status: Status): Pool[] {
  const found = new Map<string, Pool>();
  for (const node of status.nodes) {
    const key = `${node.pool}\n${node.region}`;
    const pool = found.get(key) ?? { pool: node.pool, region: node.region, nodes: 0, connected: 0, tokens_per_s: 0, leases: 0, capacity: 0, kv: null, waiting: 0 };
    found.set(key, pool);
    pool.nodes += 1;
    if (!node.connected) continue;
    pool.connected += 1;
    pool.tokens_per_s += node.tokens_per_s;
    pool.leases += node.leases;
    pool.capacity += node.max_concurrent_tasks;
    for (const load of node.engine_loads) {
      pool.waiting += load.waiting;
      if (load.kv_usage !== null) pool.kv = Math.max(pool.kv ?? 0, load.kv_usage);
    }
  }
  return [...found.values()].sort((a, b) => b.connected - a.connected);
}

function weightsTab(body: HTMLElement, run_id: string): Tab {
  const size = keep(new Chart({ title: "Bytes of a version", unit: "B", help: "What a node fetches to follow: the delta.", xLabel: "version", group: `${run_id} versions`,
    missing: "No version has a delta yet." }));
  const density = keep(new Chart({ title: "Changed weights", unit: "%", help: "Share of elements that a version changed.", xLabel: "version", group: `${run_id} versions`,
    missing: "No version has a parent yet." }));
  const rate = keep(new Chart({ title: "Time between versions", unit: "s", help: "From one announcement to the next.", xLabel: "version", group: `${run_id} versions`,
    missing: "One version is announced so far." }));
  const map = el("div");
  append(body, [el("h2", {}, "Weights", el("span.about", {}, "What do versions cost, and does every node follow?")),
    el("div.grid", {}, size.element, density.element, rate.element), map]);
  return {
    draw: (status) => fill(map,
      el("div.card", {}, el("h3", {}, "How soon regions follow"), el("p.help", {}, "From the notice of a version until a node serves it: fetching, applying and swapping."), regionTable(status)),
      el("div.card", {}, el("h3", {}, "Version lag, node by policy"), versionMap(status))),
    load: async (status) => {
      const found = await Promise.all(trained(status).map(async (policy) => (await versions(run_id, policy.policy_id)).versions.reverse()));
      const parts = (show: (list: Version[], index: number) => number | null): Drawing => {
        const x = [...new Set(found.flatMap((list) => list.map((version) => version.version)))].sort((a, b) => a - b);
        const lines = found.map((list, colour) => {
          const values = new Map(list.map((version, index) => [version.version, show(list, index)]));
          return { label: trained(status)[colour]?.policy_id ?? "", colour, values: x.map((version) => values.get(version) ?? null) };
        });
        return { x, lines };
      };
      size.draw(parts((list, index) => list[index]?.delta_bytes || null));
      density.draw(parts((list, index) => (list[index]?.version ? (list[index]?.density ?? null) : null)));
      rate.draw(parts((list, index) => {
        const [now, before] = [list[index]?.publish_time, list[index - 1]?.publish_time];
        return now && before ? (Date.parse(now) - Date.parse(before)) / 1000 : null;
      }));
    },
    close: () => drop([size, density, rate]),
  };
}

function regionTable(status: Status): HTMLElement {
  const found = new Map<string, NodeStatus[]>();
  for (const node of status.nodes.filter((each) => each.connected)) found.set(node.region, [...(found.get(node.region) ?? []), node]);
  if (found.size === 0) return noNode("No node is connected.");
  const taken = (nodes: NodeStatus[]): number[] => nodes.map((node) => node.follow_s).filter((each): each is number => each !== null && each > 0).sort((a, b) => a - b);
  return table("How soon regions follow", [
    { head: "Region", cell: ([region]) => region || "(none)" },
    { head: "Nodes", number: true, cell: ([, nodes]) => count(nodes.length) },
    { head: "Median", number: true, cell: ([, nodes]) => seconds(taken(nodes)[Math.floor(taken(nodes).length / 2)]) },
    { head: "Longest", number: true, cell: ([, nodes]) => seconds(taken(nodes).at(-1)) },
    { head: "Versions behind, most", number: true, cell: ([, nodes]) => count(Math.max(0, ...nodes.flatMap((node) => Object.values(node.version_lags)))) },
  ], [...found.entries()].sort(([a], [b]) => a.localeCompare(b)));
}

function versionMap(status: Status): HTMLElement {
  const nodes = status.nodes.filter((node) => node.connected).slice(0, MAX_MAPPED);
  const ids = status.policies.filter((policy) => !policy.external).map((policy) => policy.policy_id);
  if (nodes.length === 0) return noNode("No node is connected.");
  return table("Versions behind, by node and policy", [
    { head: "Node", cell: (node) => el("span.id", {}, node.node_id) },
    { head: "Region", cell: (node) => node.region || "(none)" },
    ...ids.map((id) => ({ head: id, number: true, cell: (node: Status["nodes"][number]) => {
      const serving = node.serving_versions[id];
      if (serving === undefined) return el("span.muted", {}, "–");
      const lag = node.version_lags[id] ?? 0;
      return el(`span.lag.lag-${Math.min(3, lag)}`, {}, `${serving}${lag ? ` (${lag} behind)` : ""}`);
    } })),
    { head: "Faults", cell: (node) => node.weight_faults.length ? el("span.fault", {}, `${node.weight_faults.length} weight faults`) : node.engine_faults.map((fault) => words(fault.reason)).join(", ") },
  ], nodes);
}

const MULTI: Group = {
  id: "policies",
  title: "Policies",
  about: "Do the policies of the run learn together?",
  curves: [
    { title: "Reward", unit: "", help: "Mean of each step's batch.", lines: [{ label: "reward", of: "reward_mean" }] },
    { title: "Staleness", unit: "versions", help: "Mean over the tokens of a step.", lines: [{ label: "mean", of: "staleness_mean" }] },
  ],
};

function policiesTab(body: HTMLElement, run_id: string): Tab {
  const curves = curvesTab(body, run_id, MULTI);
  const place = el("div");
  body.append(place);
  return {
    ...curves,
    draw: (status) => {
      curves.draw(status);
      fill(place, el("div.card", {}, el("h3", {}, "Policies"), table("Policies", [
        { head: "Policy", cell: (policy) => el("strong", {}, policy.policy_id) },
        { head: "Kind", cell: (policy) => (policy.external ? "external" : policy.frozen ? "not trained" : "trained") },
        { head: "Step", number: true, cell: (policy) => count(policy.last_finished_step) },
        { head: "Version", number: true, cell: (policy) => (policy.version ? count(policy.version.version) : "–") },
        { head: "Reward", number: true, cell: (policy) => figure(policy.recent_training_reward, "") },
        { head: "Staleness p99", number: true, cell: (policy) => number(policy.staleness?.p99) },
        { head: "Ready", number: true, title: "Complete groups that wait for a batch", cell: (policy) => count(policy.ready_groups) },
        { head: "In flight", number: true, title: "Groups that are sampled", cell: (policy) => count(policy.outstanding_groups) },
        { head: "Credit", number: true, title: "Groups that may be leased now", cell: (policy) => count(policy.credit) },
        { head: "Kept by filters", number: true, cell: (policy) => percent(policy.acceptance) },
      ], status.policies)), el("div.card", {}, el("h3", {}, "Versions, node by policy"), versionMap(status)));
    },
  };
}

const PLACES: [string, string][] = [["ingested", "Accepted"], ["trained", "Trained"], ["in_batch", "In a batch"], ["ready", "Ready"], ["assembling", "Assembling"], ["evaluated", "Evaluated"]];

function dataTab(body: HTMLElement, run_id: string): Tab {
  const place = el("div");
  const curves = curvesTab(body, run_id, DATA_PLANE);
  body.append(place);
  return {
    ...curves,
    draw: (status) => {
      const account = status.trajectories;
      const dropped = Object.entries(account.dropped).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
      const all = Object.values(account.dropped).reduce((sum, value) => sum + value, 0);
      fill(place,
        el("div.card", {}, el("h3", {}, "Where the trajectories are"),
          el("dl.tiles", {}, ...PLACES.map(([key, title]) => tile(title, count(account[key]), title)), tile("Dropped", count(all), "For one of the reasons below"),
            tile("Unaccounted", count(account.conservation_error), "Anything but 0 is a defect")),
          dropped.length ? table("Dropped trajectories by reason", [
            { head: "Reason", cell: ([reason]) => words(reason) },
            { head: "Trajectories", number: true, cell: ([, value]) => count(value) },
            { head: "Share", number: true, cell: ([, value]) => percent(value / Math.max(1, account.ingested ?? 0)) },
          ], dropped) : el("p.calm", {}, "Nothing was dropped.")),
        el("div.card", {}, el("h3", {}, "Tasks that failed"), status.failures.length ? table("Failures by kind", [
          { head: "Reason", cell: (each) => words(each.reason) },
          { head: "Times", number: true, cell: (each) => count(each.count) },
          { head: "In a row", number: true, cell: (each) => count(each.in_a_row) },
          { head: "Last", cell: (each) => ago(each.last_time) },
          { head: "What it said", cell: (each) => el("span.detail", {}, each.detail) },
        ], status.failures) : el("p.calm", {}, "No task failed."),
          status.dead_letters ? el("p", {}, `${count(status.dead_letters)} tasks are not tried again: astraflow dead-letters list.`) : null),
        el("div.card", {}, el("h3", {}, "Archive"), status.archive
          ? el("p", {}, `${count(status.archive.written)} samples written (${bytes(status.archive.written_bytes)}), ${count(status.archive.waiting)} wait, ${count(status.archive.given_up)} given up. ${status.archive.problem}`)
          : empty("This run keeps no archive.", "With dataflow: {archive: {}} in its recipe what was trained on and dropped can be read here, under Samples.")));
    },
  };
}

function timelineTab(body: HTMLElement, run_id: string): Tab {
  const place = el("div");
  const more = el("button", { type: "button" }, "Show older events");
  let found: RunEvent[] = [];
  let next = "";
  let kinds = "all";
  const select = el("select", { id: "kinds", change: (event) => { kinds = (event.target as HTMLSelectElement).value; paint(); } },
    ...[["all", "everything"], ["fault", "faults"], ["change", "changes"], ["info", "joins and starts"]].map(([value, title]) => el("option", { value }, title)));
  append(body, [el("h2", {}, "Timeline", el("span.about", {}, "What happened to the run?")), el("div.chooser", {}, el("label", { for: "kinds" }, "Show"), select), place, more]);
  const paint = (): void => {
    const shown = found.filter((event) => kinds === "all" || weight(event.kind) === kinds);
    more.hidden = !next;
    if (shown.length === 0) {
      fill(place, empty("Nothing of this kind happened.", "Joins, leaves, faults and switches of plug-ins appear here as they happen; about the newest 2,000 are kept."));
      return;
    }
    fill(place, el("ol.timeline.card", {}, ...shown.map((event) => el(`li.${weight(event.kind)}`, {},
      el("time", { datetime: event.time, title: moment(event.time) }, clock(event.time)),
      el("span.kind", {}, happened(event.kind)), el("span.subject", {}, event.subject), el("span.detail", {}, event.detail)))));
  };
  more.addEventListener("click", () => {
    void events(run_id, next).then((page) => {
      found = [...found, ...page.events];
      next = page.next_page_token;
      paint();
    });
  });
  let read = 0;
  const load = async (): Promise<void> => {
    const page = await events(run_id);
    const known = new Set(page.events.map((event) => event.event_id));
    const older = found.filter((event) => !known.has(event.event_id));
    found = [...page.events, ...older];
    if (older.length === 0) next = page.next_page_token;
    paint();
  };
  return {
    draw: () => {
      if (Date.now() - read > 3000 && read) void load();
      read ||= 1;
    },
    load: async () => { read = Date.now(); await load(); },
    close: () => {},
  };
}
