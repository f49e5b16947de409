// Runs the conformance suite's operations with this client: one JSON object per line in, one per line out. The operations
// are in docs/clients.md; what is right is decided by whoever sends them.
#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <thread>

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include "astraflow/client.h"
#include "astraflow/columns.h"
#include "astraflow/push.h"

namespace {

using namespace astraflow::dataflow::v1;
using astraflow::Client;
using google::protobuf::Message;
using google::protobuf::Struct;
using google::protobuf::Value;
using Seconds = std::chrono::duration<double>;

std::string json_of(const Message& message) {
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(message, &text).ok()) throw std::runtime_error("no JSON");
  return text;
}

template <class Parsed>
Parsed parsed(const std::string& json) {
  Parsed message;
  const auto status = google::protobuf::util::JsonStringToMessage(json, &message);
  if (!status.ok()) throw std::runtime_error(status.ToString());
  return message;
}

// One operation.
class Operation {
 public:
  explicit Operation(const std::string& line) : fields_(parsed<Struct>(line)) {}

  bool has(const std::string& name) const { return fields_.fields().count(name) > 0; }
  const Value& at(const std::string& name) const { return fields_.fields().at(name); }
  std::string text(const std::string& name, const std::string& otherwise = "") const {
    return has(name) ? at(name).string_value() : otherwise;
  }
  std::string json(const std::string& name) const { return has(name) ? json_of(at(name)) : "{}"; }
  const google::protobuf::RepeatedPtrField<Value>& list(const std::string& name) const {
    return at(name).list_value().values();
  }

  astraflow::CallOptions options() const {
    astraflow::CallOptions options;
    if (has("timeout_s")) options.timeout = Seconds(at("timeout_s").number_value());
    options.correlation_id = text("correlation_id");
    return options;
  }

 private:
  Struct fields_;
};

using Call = std::function<std::string(const Client&, const Operation&)>;
using Next = std::function<std::string()>;
using Open = std::function<Next(const Client&, const Operation&)>;

template <class Stub, class Request, class Response>
Call calling(grpc::Status (Stub::*rpc)(grpc::ClientContext*, const Request&, Response*)) {
  return [rpc](const Client& client, const Operation& op) {
    return json_of(client.call(rpc, parsed<Request>(op.json("request")), op.options()));
  };
}

template <class Stub, class Request, class Response>
Open opening(std::unique_ptr<grpc::ClientReader<Response>> (Stub::*rpc)(grpc::ClientContext*, const Request&)) {
  return [rpc](const Client& client, const Operation& op) {
    const auto stream = std::make_shared<astraflow::Stream<Response>>(
        client.stream(rpc, parsed<Request>(op.json("request"))));
    return [stream] {
      Response message;
      return stream->next(&message) ? json_of(message) : R"({"ended":true})";
    };
  };
}

#define RPC(service, name) {#service "/" #name, calling(&service::Stub::name)}
const std::map<std::string, Call> kCalls = {
    RPC(AdminService, DrainNode),   RPC(AdminService, ListDeadLetters),   RPC(AdminService, Status),
    RPC(AdminService, Why),         RPC(BatchService, ClaimPolicy),       RPC(RunService, CreateRun),
    RPC(RunService, DeleteRun),     RPC(RunService, GetRun),              RPC(RunService, JoinRun),
    RPC(RunService, ListRuns),      RPC(RunService, UpdateRun),           RPC(TaskService, FailTask),
    RPC(TaskService, LeaseTasks),   RPC(TaskService, RenewLeases),        RPC(TaskService, SubmitTasks),
    RPC(VersionService, Publish),   RPC(TrajectoryService, PushEpisode),
};
const std::map<std::string, Open> kStreams = {
    {"AdminService/Watch", opening(&AdminService::Stub::Watch)},
    {"VersionService/Watch", opening(&VersionService::Stub::Watch)},
};

// What is open, by name.
struct Opened {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Client>> clients;
  std::map<std::string, Next> streams;
  std::map<std::string, std::shared_ptr<astraflow::PushStream>> pushes;

  template <class Kind>
  Kind named(std::map<std::string, Kind>& kind, const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex);
    return kind.at(name);
  }
  template <class Kind>
  void put(std::map<std::string, Kind>& kind, const std::string& name, Kind value) {
    const std::lock_guard<std::mutex> lock(mutex);
    kind[name] = std::move(value);
  }
} opened;

std::string connect(const Operation& op) {
  astraflow::ConnectOptions options;
  options.token = op.text("token");
  if (op.has("retry_total_s")) options.retry.total = Seconds(op.at("retry_total_s").number_value());
  opened.put(opened.clients, op.text("client", "main"), std::make_shared<Client>(op.text("address"), options));
  return "{}";
}

std::string encode(const Operation& op) {
  astraflow::Columns columns;
  for (const auto& each : op.list("token_ids")) columns.token_ids.push_back(static_cast<int32_t>(each.number_value()));
  for (const auto& each : op.list("loss_mask")) columns.loss_mask.push_back(each.bool_value());
  for (const auto& each : op.list("logprobs")) columns.logprobs.push_back(static_cast<float>(each.number_value()));
  for (const auto& each : op.list("version_spans")) {
    const auto& numbers = each.list_value().values();
    auto& span = columns.version_spans.emplace_back();
    span.set_start(static_cast<uint32_t>(numbers[0].number_value()));
    span.set_end(static_cast<uint32_t>(numbers[1].number_value()));
    span.set_version(static_cast<uint64_t>(numbers[2].number_value()));
  }
  return json_of(astraflow::encode_columns(columns, op.text("trajectory_id")));
}

template <class Sequence>
Value listed(const Sequence& sequence, const std::function<void(Value*, size_t)>& put) {
  Value list;
  for (size_t i = 0; i < static_cast<size_t>(sequence.size()); ++i) put(list.mutable_list_value()->add_values(), i);
  list.mutable_list_value();
  return list;
}

std::string decode(const Operation& op) {
  const auto message = parsed<astraflow::rollout::v1::Trajectory>(op.json("message"));
  astraflow::require_columns(message);
  const auto tokens = astraflow::token_ids(message);
  const auto logprobs = astraflow::logprobs(message);
  const auto mask = astraflow::loss_mask(message);
  const auto& spans = message.version_spans();
  Struct answer;
  auto& fields = *answer.mutable_fields();
  fields["token_ids"] = listed(tokens, [&](Value* value, size_t i) { value->set_number_value(tokens[i]); });
  fields["logprobs"] = listed(logprobs, [&](Value* value, size_t i) { value->set_number_value(logprobs[i]); });
  fields["loss_mask"] = listed(mask, [&](Value* value, size_t i) { value->set_bool_value(mask[i]); });
  fields["version_spans"] = listed(spans, [&](Value* value, size_t i) {
    const auto& span = spans[static_cast<int>(i)];
    for (double number : {double(span.start()), double(span.end()), double(span.version())}) {
      value->mutable_list_value()->add_values()->set_number_value(number);
    }
  });
  return json_of(answer);
}

std::string push(const Operation& op) {
  const auto stream = opened.named(opened.pushes, op.text("stream", "main"));
  std::vector<std::future<PushResult>> results;
  for (const auto& each : op.list("episodes")) {
    results.push_back(stream->push(parsed<astraflow::rollout::v1::Episode>(json_of(each))));
  }
  std::string answer;
  for (auto& result : results) answer += (answer.empty() ? "[" : ",") + json_of(result.get());
  return answer + "]";
}

std::string reset(const Operation&) {
  for (auto& [name, stream] : opened.pushes) stream->close(Seconds(0));
  opened.pushes.clear();
  opened.streams.clear();
  opened.clients.clear();
  return "{}";
}

std::shared_ptr<Client> client_of(const Operation& op) {
  const auto client = opened.named(opened.clients, op.text("client", "main"));
  return op.has("as") ? std::make_shared<Client>(client->as(op.text("as"))) : client;
}

const std::map<std::string, std::function<std::string(const Operation&)>> kOperations = {
    {"connect", connect},
    {"server_info",
     [](const Operation& op) {
       const auto info = client_of(op)->server_info();
       return R"({"contract_version":)" + std::to_string(info.contract_version()) + R"(,"product_version":")" +
              info.product_version() + "\"}";
     }},
    {"call", [](const Operation& op) { return kCalls.at(op.text("rpc"))(*client_of(op), op); }},
    {"stream.open",
     [](const Operation& op) {
       opened.put(opened.streams, op.text("stream", "main"), kStreams.at(op.text("rpc"))(*client_of(op), op));
       return std::string("{}");
     }},
    {"stream.next", [](const Operation& op) { return opened.named(opened.streams, op.text("stream", "main"))(); }},
    {"stream.close",
     [](const Operation& op) {
       opened.put(opened.streams, op.text("stream", "main"), Next());
       return std::string("{}");
     }},
    {"encode_columns", encode},
    {"decode_columns", decode},
    {"push.open",
     [](const Operation& op) {
       opened.put(opened.pushes, op.text("stream", "main"), std::make_shared<astraflow::PushStream>(*client_of(op)));
       return std::string("{}");
     }},
    {"push", push},
    {"push.close",
     [](const Operation& op) {
       const bool is_done = opened.named(opened.pushes, op.text("stream", "main"))->close();
       return std::string(R"({"all_answered":)") + (is_done ? "true}" : "false}");
     }},
    {"reset", reset},
};

std::string described(const astraflow::Error& error) {
  static const char* const branches[] = {"retryable", "request", "state", "other"};
  Struct found;
  auto& fields = *found.mutable_fields();
  fields["reason"].set_string_value(error.reason());
  fields["code"].set_string_value(error.code());
  fields["branch"].set_string_value(branches[static_cast<int>(error.kind())]);
  fields["message"].set_string_value(error.what());
  auto& metadata = *fields["metadata"].mutable_struct_value()->mutable_fields();
  for (const auto& [name, text] : error.metadata()) metadata[name].set_string_value(text);
  if (error.retry_after()) fields["retry_after_s"].set_number_value(Seconds(*error.retry_after()).count());
  return json_of(found);
}

std::string reply(const Operation& op) {
  const auto found = kOperations.find(op.text("op"));
  if (found == kOperations.end()) return R"("unsupported":)" + op.json("op");
  try {
    return "\"answer\":" + found->second(op);
  } catch (const astraflow::Error& error) {
    return "\"error\":" + described(error);
  } catch (const std::exception& error) {
    Value text;
    text.set_string_value(error.what());
    return "\"crashed\":" + json_of(text);
  }
}

}  // namespace

int main() {
  std::mutex writing;
  for (std::string line; std::getline(std::cin, line);) {
    // Operations overlap: each has a thread of its own.
    std::thread([&writing, line] {
      const Operation op(line);
      const std::string text = "{\"id\":" + op.json("id") + "," + reply(op) + "}\n";
      const std::lock_guard<std::mutex> lock(writing);
      std::cout << text << std::flush;
    }).detach();
  }
  std::_Exit(0);  // what still waits for an answer is nobody's any more
}
