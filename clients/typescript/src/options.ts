/** Generated contracts of `astraflow.options.v1`. */
export * from "./gen/astraflow/options/v1/options_pb.js";
