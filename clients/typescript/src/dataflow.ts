/** Generated contracts of `astraflow.dataflow.v1`. */
export * from "./gen/astraflow/dataflow/v1/account_pb.js";
export * from "./gen/astraflow/dataflow/v1/admin_service_pb.js";
export * from "./gen/astraflow/dataflow/v1/batch_pb.js";
export * from "./gen/astraflow/dataflow/v1/batch_service_pb.js";
export * from "./gen/astraflow/dataflow/v1/durability_pb.js";
export * from "./gen/astraflow/dataflow/v1/evaluation_service_pb.js";
export * from "./gen/astraflow/dataflow/v1/run_pb.js";
export * from "./gen/astraflow/dataflow/v1/run_service_pb.js";
export * from "./gen/astraflow/dataflow/v1/sample_pb.js";
export * from "./gen/astraflow/dataflow/v1/sample_service_pb.js";
export * from "./gen/astraflow/dataflow/v1/task_service_pb.js";
export * from "./gen/astraflow/dataflow/v1/trace_pb.js";
export * from "./gen/astraflow/dataflow/v1/trajectory_service_pb.js";
export * from "./gen/astraflow/dataflow/v1/version_pb.js";
export * from "./gen/astraflow/dataflow/v1/version_service_pb.js";
