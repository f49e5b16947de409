/** Generated contracts of `astraflow.server.v1`. */
export * from "./gen/astraflow/server/v1/server_info_pb.js";
