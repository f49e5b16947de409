/** Client of AstraFlow. Messages of the contracts are in the subpaths `/dataflow`, `/rollout`, `/trainer`, … */
export {
  Client,
  connect,
  pages,
  CONTRACT_VERSION,
  MAX_MESSAGE_BYTES,
  VERSION,
  type ConnectOptions,
} from "./client.js";
export { DEFAULT_TIMEOUT_MS, type CallOptions, type ServiceClient } from "./service.js";
export type { RetryPolicy } from "./retry.js";
export type { Token, TrustOptions } from "./address.js";
export { formatJoin, isJoinString, parseJoin, type JoinString } from "./join.js";
export { correlated } from "./correlation.js";
export * from "./errors.js";
export {
  decodeColumns,
  decodeLogprobs,
  encodeColumns,
  packMask,
  unpackMask,
  type Columns,
  type ColumnsInit,
  type Span,
} from "./columns.js";
export { finishedEpisode, trajectoryItem, type EpisodeInit, type TrajectoryInit } from "./episodes.js";
export { follow, type FollowOptions } from "./streams.js";
export { PushStream, type PushLimits } from "./push.js";
export { joinRun, TaskFailed, WorkSession, type NodeOptions, type Work } from "./work.js";
