/**
 * An evaluation harness: submits the tasks of a file to a run and reports what they earned.
 *
 *     node dist/examples/evaluate.js 127.0.0.1:7070 tasks.jsonl [samples]
 *
 * Each line of the file is `{"id": "sum-1", "prompt": "What is 17 + 25?", "answer": "42"}`; `answer` is what the run's
 * reward reads. The nodes of the run sample each task `samples` times (2) and grade it. A task whose nodes give up
 * counts as 0.
 * The variable ASTRAFLOW_JOIN, which may hold a join string, takes the place of the address.
 */
import { readFileSync } from "node:fs";
import { setTimeout as delay } from "node:timers/promises";
import { connect, type Client } from "@astraflow/client";
import { TaskState, type TaskTrace } from "@astraflow/client/dataflow";

interface Question {
  id: string;
  prompt: string;
  answer: string;
}

const MOST_TASKS_OF_A_CALL = 1_000;

async function submit(
  client: Client,
  questions: Question[],
  groupSize: number,
  attempt: string,
): Promise<string[]> {
  const tasks = questions.map(({ id, prompt, answer }) => ({
    taskId: `${attempt}.${id}`,
    messages: [{ role: "user", content: prompt }],
    dataJson: new TextEncoder().encode(JSON.stringify({ answer })),
    groupSize,
    source: "evaluate",
  }));
  for (let first = 0; first < tasks.length; first += MOST_TASKS_OF_A_CALL) {
    // Safe to repeat: the server counts a task whose id it knows as a duplicate.
    await client.tasks.submitTasks({ tasks: tasks.slice(first, first + MOST_TASKS_OF_A_CALL) });
  }
  return tasks.map(({ taskId }) => taskId);
}

async function finished(client: Client, taskId: string): Promise<TaskTrace> {
  for (;;) {
    const { task } = await client.admin.why({ taskId });
    if (task !== undefined && task.state >= TaskState.COMPLETE) return task;
    await delay(250);
  }
}

const [address = "127.0.0.1:7070", file = "tasks.jsonl", samples = "2"] = process.argv.slice(2);
const questions: Question[] = readFileSync(file, "utf8")
  .split("\n")
  .filter(Boolean)
  .map((line) => JSON.parse(line));
const client = connect(process.env["ASTRAFLOW_JOIN"] ?? address);
try {
  const attempt = `evaluate-${Date.now()}`;
  const taskIds = await submit(client, questions, Number(samples), attempt);
  let sum = 0;
  for (const taskId of taskIds) {
    const task = await finished(client, taskId);
    const rewards = task.trajectories.map(({ reward }) => reward);
    const mean = rewards.reduce((total, reward) => total + reward, 0) / Math.max(1, rewards.length);
    sum += mean;
    const failures = task.leases
      .map(({ outcome }) => outcome)
      .filter((outcome) => outcome !== "completed")
      .join(", ");
    console.log(
      `${taskId.slice(attempt.length + 1)}\t${mean.toFixed(3)}\t${rewards.join(" ")}${failures && `\t(${failures})`}`,
    );
  }
  console.log(`mean reward ${(sum / taskIds.length).toFixed(3)} of ${taskIds.length} tasks`);
} finally {
  client.close();
}
