/** Generated contracts of `astraflow.rollout.v1`. */
export * from "./gen/astraflow/rollout/v1/blob_pb.js";
export * from "./gen/astraflow/rollout/v1/task_pb.js";
export * from "./gen/astraflow/rollout/v1/trajectory_pb.js";
