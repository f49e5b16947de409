/** Generated contracts of `astraflow.trainer.v1`. */
export * from "./gen/astraflow/trainer/v1/trainer_service_pb.js";
