/**
 * A rollout node around any OpenAI-compatible endpoint that returns token ids: vLLM, SGLang or a proxy of them.
 *
 *     OPENAI_API_KEY=… node dist/examples/rollout-node.js 127.0.0.1:7070 http://127.0.0.1:8000/v1 MODEL
 *
 * It joins the run, takes tasks, samples one chat completion for each member and pushes it with its tokens and
 * log-probs. The reward is 1 when the answer in the task's data is part of the text. The endpoint serves the version
 * that was the newest when the node joined; start the node again after the endpoint has loaded another one.
 * The variable ASTRAFLOW_JOIN, which may hold a join string, takes the place of the address.
 */
import { randomUUID } from "node:crypto";
import { hostname } from "node:os";
import { connect, finishedEpisode, joinRun, PushStream, TaskFailed, trajectoryItem } from "@astraflow/client";
import type { Lease } from "@astraflow/client/rollout";

/** The part of a chat completion that is used. */
interface Completion {
  prompt_token_ids?: number[];
  choices: {
    message: { content: string | null };
    finish_reason: string;
    token_ids?: number[];
    logprobs?: { content: { logprob: number }[] };
  }[];
}

const [address = "127.0.0.1:7070", endpoint = "http://127.0.0.1:8000/v1", model = "default"] =
  process.argv.slice(2);
const nodeId = `${hostname()}-openai`.replaceAll(/[^A-Za-z0-9._-]/g, "-").slice(0, 64);
const client = connect(process.env["ASTRAFLOW_JOIN"] ?? address);
const session = await joinRun(client, { nodeId, maxConcurrentTasks: 8, engines: ["openai"] });
const [served] = session.versions;
if (served === undefined) throw new Error("the run has no version yet: start its trainer first");
const { policyId, version } = served;
const pushes = new PushStream(client);

async function complete(lease: Lease, signal: AbortSignal): Promise<Completion> {
  const { temperature = 1, maxNewTokens = 256 } = lease.sampling[policyId] ?? {};
  const messages = lease.task?.messages.map(({ role, content }) => ({ role, content }));
  const asked = {
    model,
    messages,
    temperature,
    max_tokens: maxNewTokens,
    logprobs: true,
    return_token_ids: true,
  };
  const headers = {
    "content-type": "application/json",
    authorization: `Bearer ${process.env["OPENAI_API_KEY"] ?? ""}`,
  };
  const body = JSON.stringify(asked);
  const response = await fetch(`${endpoint}/chat/completions`, { method: "POST", headers, body, signal });
  if (response.ok) return (await response.json()) as Completion;
  throw new TaskFailed("engine_error", `the endpoint answered ${response.status}: ${await response.text()}`);
}

async function episode(lease: Lease, member: number, signal: AbortSignal) {
  const {
    prompt_token_ids: prompt,
    choices: [choice],
  } = await complete(lease, signal);
  const sampled = choice?.token_ids;
  const logprobs = choice?.logprobs?.content.map(({ logprob }) => logprob);
  if (!choice || !prompt || !sampled || sampled.length !== logprobs?.length) {
    throw new TaskFailed(
      "missing_capability",
      "the endpoint returns no token ids with log-probs (return_token_ids)",
    );
  }
  const { answer } = JSON.parse(new TextDecoder().decode(lease.task?.dataJson)) as { answer: string };
  const episodeId = randomUUID();
  const item = trajectoryItem({
    trajectoryId: `${episodeId}.${policyId}`,
    policyId,
    tokenIds: [...prompt, ...sampled],
    lossMask: [...prompt.map(() => 0), ...sampled.map(() => 1)],
    logprobs: [...prompt.map(() => 0), ...logprobs],
    versionSpans: [{ start: prompt.length, end: prompt.length + sampled.length, version }],
    reward: choice.message.content?.includes(answer) ? 1 : 0,
    finishReason: choice.finish_reason,
    sampling: { temperature: lease.sampling[policyId]?.temperature ?? 1 },
  });
  return finishedEpisode(lease, { episodeId, nodeId, member, trajectories: [item] });
}

async function run(lease: Lease, signal: AbortSignal): Promise<void> {
  await Promise.all(lease.members.map(async (member) => pushes.push(await episode(lease, member, signal))));
  console.log(`finished ${lease.task?.taskId}`);
}

const stop = new AbortController();
for (const name of ["SIGINT", "SIGTERM"] as const) process.once(name, () => stop.abort());
console.log(`${nodeId} works for run ${session.run.runId}, ${policyId} at version ${version}`);
const state = () => ({ servingVersions: { [policyId]: version } });
const onLost = (error: Error) => console.error(`the server is away: ${error.message}`);
console.log(`ended: ${await session.serve({ run, pushes, state, onLost }, { signal: stop.signal })}`);
await pushes.close();
client.close();
