// What the conformance suite does not see: join strings by the table of all languages, views, and whom a client trusts.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <future>
#include <iterator>
#include <memory>
#include <optional>
#include <sstream>
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

// A certificate of its own authority for a name, and its key, in PEM.
struct Proof {
  explicit Proof(const std::string& name) {
    char folder[] = "/tmp/astraflow-XXXXXX";
    check(mkdtemp(folder) != nullptr, "no temporary folder");
    const std::string at = folder;
    const std::string command = "cd " + at + " && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 " +
                                "-subj /CN=" + name + " -addext subjectAltName=DNS:" + name + " -keyout key -out cert 2> log";
    check(std::system(command.c_str()) == 0, command);
    cert = content(at + "/cert"), key = content(at + "/key");
    check(std::system(("rm -r " + at).c_str()) == 0, "rm " + at);
  }

  static std::string content(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::string cert, key;
};

// Keeps the tokens that it was called with.
class TokenServer final : public astraflow::dataflow::v1::RunService::Service {
 public:
  grpc::Status ListRuns(grpc::ServerContext* context, const astraflow::dataflow::v1::ListRunsRequest*,
                        astraflow::dataflow::v1::ListRunsResponse*) override {
    const auto sent = context->client_metadata().find("authorization");
    token = sent == context->client_metadata().end() ? "" : std::string(sent->second.data(), sent->second.size());
    return grpc::Status::OK;
  }

  std::string token;
};

// What a server shows and asks for, and what the files of its callers say.
struct State {
  const Proof* shown;
  const Proof* clients = nullptr;
  bool moves = false;
  std::string server_name = "localhost", token = "";
};

// A server that can become another one, and the files by which a client reaches it.
class World {
 public:
  World() {
    char folder[] = "/tmp/astraflow-XXXXXX";
    check(mkdtemp(folder) != nullptr, "no temporary folder");
    folder_ = folder;
  }
  ~World() {
    if (server_) server_->Shutdown();
    check(std::system(("rm -r " + folder_).c_str()) == 0, "rm " + folder_);
  }

  void serve(const State& state) {
    if (server_) server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
    grpc::SslServerCredentialsOptions tls(state.clients ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                                        : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
    tls.pem_key_cert_pairs.push_back({state.shown->key, state.shown->cert});
    if (state.clients) tls.pem_root_certs = state.clients->cert;
    grpc::ServerBuilder builder;
    const std::string address = "127.0.0.1:" + std::to_string(state.moves ? 0 : port_);
    builder.AddListeningPort(address, grpc::SslServerCredentials(tls), &port_).RegisterService(&service);
    server_ = builder.BuildAndStart();
    check(server_ != nullptr, "no server at " + address);
  }

  void write(const State& state) const {
    Struct said;
    (*said.mutable_fields())["address"].set_string_value("127.0.0.1:" + std::to_string(port_));
    (*said.mutable_fields())["server_name"].set_string_value(state.server_name);
    (*said.mutable_fields())["token"].set_string_value(state.token);
    std::string der;
    std::istringstream lines(state.shown->cert);
    for (std::string line; std::getline(lines, line);) der += line[0] == '-' ? "" : line;
    (*said.mutable_fields())["ca"].mutable_list_value()->add_values()->set_string_value(der);
    std::string json;
    check(google::protobuf::util::MessageToJsonString(said, &json).ok(), "no JSON");
    put("join", "af1." + base64url(json));
    put("ca", state.shown->cert);
    if (state.clients) put("cert", state.clients->cert), put("key", state.clients->key);
  }

  void put(const std::string& name, const std::string& content) const { std::ofstream(path(name)) << content; }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  TokenServer service;

 private:
  static std::string base64url(const std::string& text) {
    static const char kAlphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    std::string written;
    unsigned bits = 0, count = 0;
    for (const unsigned char each : text) {
      for (bits = bits << 8 | each, count += 8; count >= 6; count -= 6) written += kAlphabet[bits >> (count - 6) & 63];
    }
    if (count > 0) written += kAlphabet[bits << (6 - count) & 63];
    return written;
  }

  std::string folder_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

void reach(const astraflow::Client& client) {
  client.call(&astraflow::dataflow::v1::RunService::Stub::ListRuns, astraflow::dataflow::v1::ListRunsRequest());
}

void what_changes_in_the_files_is_in_force_with_the_next_call() {
  const Proof one("localhost"), two("localhost"), renamed("other.example");
  const std::vector<std::pair<std::string, std::vector<State>>> changes = {
      {"address", {{&one}, {&one, nullptr, true}}},
      {"authority", {{&one}, {&two}}},
      {"server name", {{&one}, {&renamed, nullptr, false, "other.example"}}},
      {"token", {{&one, nullptr, false, "localhost", "t"}, {&one, nullptr, false, "localhost", "u"}}},
      {"CA file", {{&one}, {&two}}},
      {"client certificate", {{&one, &one}, {&one, &two}}},
  };
  for (const auto& [name, states] : changes) {
    World world;
    std::optional<astraflow::Client> client;
    for (const State& state : states) {
      world.serve(state);
      world.write(state);
      astraflow::ConnectOptions options;
      options.join_file = world.path("join");
      if (name == "CA file") options.ca_file = world.path("ca");
      if (state.clients) options.client_cert_file = world.path("cert"), options.client_key_file = world.path("key");
      if (!client) client.emplace("", options);
      reach(*client);
      check(world.service.token == (state.token.empty() ? "" : "Bearer " + state.token), name + ": " + world.service.token);
    }
    world.put("join", "af1.torn");
    reach(*client);  // by what was before
  }
}

void a_server_is_awaited_whose_certificate_is_replaced_before_the_files_are() {
  const Proof one("localhost"), two("localhost");
  World world;
  world.serve({&one});
  world.write({&one});
  astraflow::ConnectOptions options;
  options.join_file = world.path("join");
  const astraflow::Client client("", options);
  reach(client);
  world.serve({&two});
  auto reached = std::async(std::launch::async, [&] { reach(client); });
  check(reached.wait_for(std::chrono::milliseconds(200)) == std::future_status::timeout, "the call waits");
  world.write({&two});
  reached.get();
}

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
  what_changes_in_the_files_is_in_force_with_the_next_call();
  a_server_is_awaited_whose_certificate_is_replaced_before_the_files_are();
  columns_are_views_of_their_message();
  what_waits_is_pushed_together_and_what_could_not_be_taken_in_comes_again();
  one_response_may_acknowledge_several_pushes_and_one_that_is_not_to_what_was_sent_none();
}
