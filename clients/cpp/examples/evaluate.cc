// An evaluation harness: submits the tasks of a file to a run and reports what they earned.
//
//     ASTRAFLOW_JOIN=127.0.0.1:7070 evaluate tasks.jsonl
//
// Each line of the file is a Task of the contracts in proto3 JSON: `{"taskId": "sum-1", "messages": [{"role": "user",
// "content": "What is 17 + 25?"}], "dataJson": "eyJhbnN3ZXIiOiAiNDIifQ=="}`; `dataJson`, in base64, is what the run's
// reward reads. The nodes of the run sample each task twice and grade it. A task whose nodes give up counts as 0.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <thread>

#include <google/protobuf/util/json_util.h>

#include "astraflow/client.h"

using namespace astraflow::dataflow::v1;

int main(int, char** arguments) try {
  const char* target = std::getenv("ASTRAFLOW_JOIN");
  const astraflow::Client client(target ? target : "127.0.0.1:7070");
  SubmitTasksRequest request;
  std::ifstream file(arguments[1]);
  for (std::string line; std::getline(file, line);) {
    auto* task = request.add_tasks();
    if (!google::protobuf::util::JsonStringToMessage(line, task).ok()) throw std::runtime_error("no task: " + line);
    task->set_group_size(2);
  }
  client.call(&TaskService::Stub::SubmitTasks, request);
  double sum = 0;
  for (const auto& task : request.tasks()) {
    WhyRequest asked;
    asked.set_task_id(task.task_id());
    WhyResponse found;
    while ((found = client.call(&AdminService::Stub::Why, asked)).task().state() < TASK_STATE_COMPLETE) {
      std::this_thread::sleep_for(std::chrono::milliseconds(250));
    }
    double mean = 0;
    for (const auto& each : found.task().trajectories()) mean += each.reward() / found.task().trajectories_size();
    sum += mean;
    std::printf("%s\t%.3f\n", task.task_id().c_str(), mean);
  }
  std::printf("mean reward %.3f of %d tasks\n", sum / request.tasks_size(), request.tasks_size());
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
