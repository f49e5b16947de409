/**
 * A live status page of a run.
 *
 *     node dist/examples/status-page.js 127.0.0.1:7070 8080
 *
 * and open http://127.0.0.1:8080. The page is updated whenever the run changes, and goes on after a restart of the
 * server. It listens on this machine only.
 * The variable ASTRAFLOW_JOIN, which may hold a join string, takes the place of the address.
 */
import { createServer, type ServerResponse } from "node:http";
import { toJsonString } from "@bufbuild/protobuf";
import { connect, follow } from "@astraflow/client";
import { StatusResponseSchema } from "@astraflow/client/dataflow";

const PAGE = `<!doctype html><meta charset="utf-8"><title>AstraFlow</title>
<style>body { font: 15px system-ui; margin: 2rem } td, th { padding: .2rem 1rem; text-align: left }</style>
<h1 id="run">…</h1><p id="lost"></p><table id="policies"></table><h2>Nodes</h2><table id="nodes"></table>
<h2>Waits</h2><table id="waits"></table>
<script>
  const line = (kind, cells) => {
    const row = document.createElement("tr");
    row.append(...cells.map((cell) => Object.assign(document.createElement(kind), {textContent: cell ?? 0})));
    return row;
  };
  const rows = (id, head, found) => document.getElementById(id)
    .replaceChildren(line("th", head), ...found.map((cells) => line("td", cells)));
  const events = new EventSource("/events");
  events.addEventListener("lost", ({data}) => document.getElementById("lost").textContent = data);
  events.onmessage = ({data}) => {
    const status = JSON.parse(data);
    document.getElementById("lost").textContent = "";
    document.getElementById("run").textContent = status.runId + " " + status.state.slice(10).toLowerCase();
    rows("policies", ["policy", "version", "step", "reward", "ready"], (status.policies ?? []).map((policy) =>
      [policy.policyId, policy.version?.version, policy.lastFinishedStep, policy.recentTrainingReward,
       policy.readyGroups]));
    rows("nodes", ["node", "leases", "episodes", "waits for"], (status.nodes ?? []).map((node) =>
      [node.nodeId, node.leases, node.episodes, node.waitingFor ?? ""]));
    rows("waits", ["stage", "policy", "reason", "detail"], (status.waits ?? []).map((wait) =>
      [wait.stage, wait.policyId ?? "", wait.reason, wait.detail]));
  };
</script>`;

const [address = "127.0.0.1:7070", port = "8080"] = process.argv.slice(2);
const client = connect(process.env["ASTRAFLOW_JOIN"] ?? address);

async function stream(page: ServerResponse): Promise<void> {
  const left = new AbortController();
  page.on("close", () => left.abort());
  const lost = (message: string) => page.write(`event: lost\ndata: ${message.replaceAll("\n", " ")}\n\n`);
  const changes = follow((options) => client.admin.watch({}, options), {
    signal: left.signal,
    onLost: ({ message }) => lost(message),
  });
  try {
    for await (const { status } of changes) {
      if (status) page.write(`data: ${toJsonString(StatusResponseSchema, status)}\n\n`);
    }
  } catch (error) {
    lost(String(error));
    page.end();
  }
}

const server = createServer((request, response) => {
  if (request.url !== "/events") {
    response.writeHead(200, { "content-type": "text/html; charset=utf-8" }).end(PAGE);
    return;
  }
  response.writeHead(200, { "content-type": "text/event-stream", "cache-control": "no-store" });
  void stream(response);
});
server.listen(Number(port), "127.0.0.1", () =>
  console.log(`http://127.0.0.1:${(server.address() as { port: number }).port}`),
);
