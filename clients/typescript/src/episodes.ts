/** Episodes as the contract wants them, made from what a node has: a lease, its tokens and a reward. */
import { create, toBinary, type MessageInitShape } from "@bufbuild/protobuf";
import { encodeColumns, type ColumnsInit } from "./columns.js";
import { InvalidTrajectoryError } from "./errors.js";
import type { Lease, SamplingParamsSchema } from "./gen/astraflow/rollout/v1/task_pb.js";
import {
  EpisodeSchema,
  EpisodeStatus,
  TrajectoryItemSchema,
  TrajectorySchema,
  type Episode,
  type TrajectoryItem,
  type TurnSpanSchema,
} from "./gen/astraflow/rollout/v1/trajectory_pb.js";

/** One policy's tokens of one episode, with what they earned. */
export interface TrajectoryInit extends ColumnsInit {
  /** Unique in its run; 1–128 printable characters. */
  trajectoryId: string;
  policyId: string;
  /** Role that it played; left out, the role of the policy's own name. */
  role?: string;
  /** Finite. */
  reward: number;
  /** `stop`, `length`, `abort`, … */
  finishReason: string;
  /** Sampling parameters that the log-probs refer to. */
  sampling: MessageInitShape<typeof SamplingParamsSchema>;
  turnSpans?: MessageInitShape<typeof TurnSpanSchema>[];
  metrics?: Record<string, number>;
}

/** Which episode of a lease it is, and who ran it. */
export interface EpisodeInit {
  episodeId: string;
  nodeId: string;
  /** One of `lease.members`. */
  member: number;
  trajectories: TrajectoryItem[];
  metrics?: Record<string, number>;
}

/**
 * Returns the item for one trajectory: its columns as bytes, and the header that follows from them.
 *
 * @throws InvalidTrajectoryError when lengths differ, nothing is trained on, or a trained token is in no span.
 */
export function trajectoryItem(init: TrajectoryInit): TrajectoryItem {
  const body = encodeColumns(init, init.trajectoryId);
  body.sampling = create(TrajectorySchema, { sampling: init.sampling }).sampling!;
  body.turnSpans = create(TrajectorySchema, { turnSpans: init.turnSpans ?? [] }).turnSpans;
  const trained = Array.from(init.lossMask).flatMap((isTrained, token) => (isTrained ? [token] : []));
  if (trained.length === 0) {
    throw new InvalidTrajectoryError(
      `trajectory ${init.trajectoryId}: no token is trained on; leave it out of the episode`,
    );
  }
  const versions = trained.map((token) => versionAt(init, token));
  return create(TrajectoryItemSchema, {
    header: {
      trajectoryId: init.trajectoryId,
      policyId: init.policyId,
      role: init.role ?? "",
      numTokens: init.tokenIds.length,
      numTrainableTokens: trained.length,
      minVersion: versions.reduce((one, other) => (other < one ? other : one)),
      maxVersion: versions.reduce((one, other) => (other > one ? other : one)),
      reward: init.reward,
      finishReason: init.finishReason,
      metrics: init.metrics ?? {},
    },
    body: toBinary(TrajectorySchema, body),
  });
}

/** Returns the finished episode of one member of `lease`. */
export function finishedEpisode(lease: Lease, init: EpisodeInit): Episode {
  return create(EpisodeSchema, {
    runId: lease.runId,
    taskId: lease.task?.taskId ?? "",
    attempt: lease.attempt,
    leaseId: lease.leaseId,
    status: EpisodeStatus.FINISHED,
    ...init,
  });
}

function versionAt(init: TrajectoryInit, token: number): bigint {
  const span = init.versionSpans.find(({ start, end }) => start <= token && token < end);
  if (span !== undefined) return span.version;
  throw new InvalidTrajectoryError(
    `trajectory ${init.trajectoryId}: token ${token} is trained on and in no version span; ` +
      "name the version it was sampled under",
    { metadata: { reason: "bad_spans" } },
  );
}
