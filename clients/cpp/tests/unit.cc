// What the conformance suite does not see: join strings by the table of all languages, views, and whom a client trusts.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <future>
#include <iterator>
#include <memory>
#include <optional>
#include <vector>

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include "astraflow/client.h"
#include "astraflow/columns.h"
#include "astraflow/join.h"
#include "astraflow/push.h"

namespace {

using google::protobuf::Struct;

void check(bool is_so, const std::string& what) {
  if (is_so) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

template <class Do>
std::string refused(Do act) {
  try {
    act();
  } catch (const astraflow::RequestError& error) {
    check(error.reason() == "INVALID_ARGUMENT", error.reason());
    return error.what();
  }
  return "";
}

Struct table_at(const char* path) {
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  Struct table;
  check(google::protobuf::util::JsonStringToMessage(text, &table).ok(), std::string("no table at ") + path);
  return table;
}

void join_strings_are_read_as_in_every_language(const char* path) {
  const Struct table = table_at(path);
  const auto& good = table.fields().at("good").list_value().values();
  for (const auto& each : good) {
    const auto& row = each.struct_value().fields();
    const auto& content = row.at("content").struct_value().fields();
    const astraflow::Join join = astraflow::parse_join(row.at("text").string_value());
    const bool is_same = join.address == content.at("address").string_value() &&
                         join.token == content.at("token").string_value() &&
                         join.server_name == content.at("server_name").string_value() &&
                         join.public_ca == content.at("public_ca").bool_value() &&
                         static_cast<int>(join.ca.size()) == content.at("ca").list_value().values_size();
    check(is_same, row.at("case").string_value());
    for (size_t i = 0; i < join.ca.size(); ++i) {
      const std::string text = content.at("ca").list_value().values(static_cast<int>(i)).string_value();
      check(join.ca_pem().find("\n" + text + "\n") != std::string::npos, "certificates of " + row.at("case").string_value());
    }
  }
  const auto& bad = table.fields().at("bad").list_value().values();
  for (const auto& each : bad) {
    const auto& row = each.struct_value().fields();
    const std::string message = refused([&] { astraflow::parse_join(row.at("text").string_value()); });
    check(message.find(row.at("says").string_value()) != std::string::npos,
          row.at("case").string_value() + ": '" + message + "' does not say " + row.at("says").string_value());
  }
  check(!good.empty() && !bad.empty(), "the table is empty");
}

void a_token_does_not_travel_in_the_clear() {
  astraflow::ConnectOptions options;
  options.token = "s3cret";
  const std::string message = refused([&] { astraflow::Client("central.example:7070", options); });
  check(!message.empty() && message.find("s3cret") == std::string::npos, "refused without showing the token");
  for (const char* target : {"127.0.0.1:7070", "[::1]:7070", "localhost:7070"}) {
    check(refused([&] { astraflow::Client(target, options); }).empty(), target);
  }
  options.insecure = true;
  check(refused([&] { astraflow::Client("central.example:7070", options); }).empty(), "insecure");
}

void columns_are_views_of_their_message() {
  const auto message = astraflow::encode_columns({{1, 2, 3}, {false, true, true}, {0, -0.5F, -1}, {}}, "t");
  astraflow::require_columns(message);
  const auto tokens = astraflow::token_ids(message);
  check(reinterpret_cast<const char*>(tokens.data()) == message.token_ids().data(), "the token ids were copied");
  check(tokens.size() == 3 && tokens[2] == 3 && astraflow::logprobs(message)[1] == -0.5F, "columns");
}

// A server of the service, and a client of it.
class Running {
 public:
  explicit Running(grpc::Service* service) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port).RegisterService(service);
    server_ = builder.BuildAndStart();
    client_.emplace("127.0.0.1:" + std::to_string(port));
  }

  const astraflow::Client& client() const { return *client_; }
  void stop() const { server_->Shutdown(); }

 private:
  std::unique_ptr<grpc::Server> server_;
  std::optional<astraflow::Client> client_;
};

// Goes away on its first stream once it may, and cannot take "c" in on the second one.
class PushServer final : public astraflow::dataflow::v1::TrajectoryService::Service {
 public:
  grpc::Status Push(grpc::ServerContext*, grpc::ServerReaderWriter<astraflow::dataflow::v1::PushResponse,
                                                                   astraflow::dataflow::v1::PushRequest>* stream) override {
    const bool is_first = ++num_streams_ == 1;
    if (is_first) {
      may_go_away.get_future().wait();
      return {grpc::StatusCode::UNAVAILABLE, "away"};
    }
    for (astraflow::dataflow::v1::PushRequest request; stream->Read(&request);) {
      astraflow::dataflow::v1::PushResponse response;
      response.set_sequence(request.sequence());
      packs += "[";
      for (const auto& episode : request.episodes()) {
        const bool is_refused = num_streams_ == 2 && episode.episode_id() == "c";
        packs += episode.episode_id();
        response.add_results()->set_outcome(is_refused ? astraflow::dataflow::v1::OUTCOME_RETRY
                                                       : astraflow::dataflow::v1::OUTCOME_ACCEPTED);
      }
      packs += "]";
      stream->Write(response);
    }
    return grpc::Status::OK;
  }

  std::promise<void> may_go_away;
  std::string packs;  // after the first stream

 private:
  int num_streams_ = 0;
};

// Acknowledges two episodes in one response: on its first stream with an answer too few, on its second with a push that
// nobody sent.
class TwoAtOnceServer final : public astraflow::dataflow::v1::TrajectoryService::Service {
 public:
  grpc::Status Push(grpc::ServerContext*, grpc::ServerReaderWriter<astraflow::dataflow::v1::PushResponse,
                                                                   astraflow::dataflow::v1::PushRequest>* stream) override {
    const bool is_first = ++num_streams_ == 1;
    astraflow::dataflow::v1::PushResponse response;
    for (astraflow::dataflow::v1::PushRequest request; response.results_size() < 2 && stream->Read(&request);) {
      response.set_sequence(request.sequence());
      for (const auto& episode : request.episodes()) {
        received += episode.episode_id();
        response.add_results()->set_outcome(astraflow::dataflow::v1::OUTCOME_ACCEPTED);
      }
      if (is_first && response.results_size() == 1) has_first.set_value();
    }
    if (is_first) response.mutable_results()->RemoveLast();
    if (num_streams_ == 2) response.set_sequence(response.sequence() + 1);
    stream->Write(response);
    for (astraflow::dataflow::v1::PushRequest request; stream->Read(&request);) received += "more";
    return grpc::Status::OK;
  }

  std::promise<void> has_first;
  std::string received;

 private:
  int num_streams_ = 0;
};

void one_response_may_acknowledge_several_pushes_and_one_that_is_not_to_what_was_sent_none() {
  TwoAtOnceServer served;
  const Running running(&served);
  astraflow::PushStream stream(running.client());
  astraflow::rollout::v1::Episode episode;
  episode.set_episode_id("a");
  auto first = stream.push(episode);
  served.has_first.get_future().wait();
  episode.set_episode_id("b");
  auto second = stream.push(episode);
  check(first.get().outcome() == astraflow::dataflow::v1::OUTCOME_ACCEPTED, "the first is accepted");
  check(second.get().outcome() == astraflow::dataflow::v1::OUTCOME_ACCEPTED, "the second is accepted");
  check(stream.close(), "closed with all answered");
  running.stop();
  check(served.received == "ababab", "the server received " + served.received);
}

void what_waits_is_pushed_together_and_what_could_not_be_taken_in_comes_again() {
  PushServer served;
  const Running running(&served);
  astraflow::PushStream stream(running.client());
  std::vector<std::future<astraflow::dataflow::v1::PushResult>> results;
  for (const char* id : {"a", "b", "c", "d", "e"}) {
    astraflow::rollout::v1::Episode episode;
    episode.set_episode_id(id);
    results.push_back(stream.push(episode));
  }
  served.may_go_away.set_value();
  for (auto& result : results) {
    check(result.get().outcome() == astraflow::dataflow::v1::OUTCOME_ACCEPTED, "accepted");
  }
  check(stream.close(), "closed with all answered");
  running.stop();
  check(served.packs == "[abcde][cde]", "the server saw " + served.packs);
}

}  // namespace

int main(int, char** arguments) {
  join_strings_are_read_as_in_every_language(arguments[1]);
  a_token_does_not_travel_in_the_clear();
  columns_are_views_of_their_message();
  what_waits_is_pushed_together_and_what_could_not_be_taken_in_comes_again();
  one_response_may_acknowledge_several_pushes_and_one_that_is_not_to_what_was_sent_none();
}
