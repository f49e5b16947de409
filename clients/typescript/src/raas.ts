/** Generated contracts of `astraflow.raas.v1`. */
export * from "./gen/astraflow/raas/v1/environment_service_pb.js";
export * from "./gen/astraflow/raas/v1/node_service_pb.js";
