/** Generated contracts of `astraflow.weights.v1`. */
export * from "./gen/astraflow/weights/v1/manifest_pb.js";
export * from "./gen/astraflow/weights/v1/part_pb.js";
