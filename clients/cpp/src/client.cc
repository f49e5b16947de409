#include "astraflow/client.h"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <fstream>
#include <iterator>
#include <random>
#include <thread>

#include <grpc/support/log.h>

#include "astraflow/join.h"
#include "astraflow/options/v1/options.pb.h"

namespace astraflow {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr int kMaxMessageBytes = 64 << 20;
constexpr RetryPolicy kReconnect{Seconds::max(), Seconds(0.1), Seconds(2)};

[[noreturn]] void refuse(const std::string& problem) { raise(Error("INVALID_ARGUMENT", problem)); }

std::string file_content(const std::string& path, const char* name, const char* reason = "INVALID_ARGUMENT") {
  std::ifstream file(path, std::ios::binary);
  std::string content{std::istreambuf_iterator<char>(file), {}};
  if (!file || content.empty()) raise(Error(reason, std::string(name) + " " + path + " cannot be read, or is empty"));
  return content;
}

std::string without_line_end(std::string text) {
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  return text;
}

grpc::ChannelArguments arguments_of(const std::string& server_name) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  // Also the time a connection may take to be made: short ones never succeed over far or busy links.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5'000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2'000);
  arguments.SetUserAgentPrefix(std::string("astraflow-cpp/") + kVersion);
  if (!server_name.empty()) arguments.SetSslTargetNameOverride(server_name);
  return arguments;
}

// What a target and options say together, with the content of their files.
struct Said {
  std::string address, server_name, token, content;
  std::shared_ptr<grpc::ChannelCredentials> credentials;
};

Join joined(const std::string& target, const ConnectOptions& options, const std::string& join_content) {
  Join join;
  if (!options.join_file.empty()) {
    if (!target.empty()) refuse("both a target and a join file are given; give one of them");
    join = parse_join(join_content);
  } else if (is_join(target)) {
    join = parse_join(target);
  } else {
    require_address(join.address = target);
  }
  if (!options.server_name.empty()) join.server_name = options.server_name;
  if (!options.token.empty()) join.token = options.token;
  join.public_ca = join.public_ca || options.public_ca;
  if (options.client_cert_file.empty() != options.client_key_file.empty()) {
    refuse("a client certificate and its key go together; give both or neither");
  }
  return join;
}

Said read_all(const std::string& target, const ConnectOptions& options) {
  Said said;
  const auto content_of = [&said](const std::string& path, const char* name) {
    const std::string content = path.empty() ? "" : file_content(path, name);
    said.content += content + '\0';
    return content;
  };
  const Join join = joined(target, options, content_of(options.join_file, "join file"));
  grpc::SslCredentialsOptions tls;
  const std::string ca = content_of(options.ca_file, "CA file");
  tls.pem_root_certs = ca.empty() ? join.ca_pem() : ca;
  tls.pem_cert_chain = content_of(options.client_cert_file, "client certificate");
  tls.pem_private_key = content_of(options.client_key_file, "client key");
  if (!tls.pem_root_certs.empty() || join.public_ca) said.credentials = grpc::SslCredentials(tls);
  const bool has_token = !join.token.empty() || !options.token_file.empty();
  if (!said.credentials && (!join.server_name.empty() || !options.client_cert_file.empty())) {
    refuse("a server name and a client certificate are for TLS; say whom to trust: a CA file, or public_ca");
  }
  if (has_token && !said.credentials && !options.insecure && !is_loopback(join.address)) {
    refuse("the token for " + join.address + " would travel in the clear; say whom to trust (a join string, a CA file, " +
           "or public_ca), or accept the risk with insecure");
  }
  said.address = join.address, said.server_name = join.server_name, said.token = join.token;
  return said;
}

// Changes with every replacement of the files, also of a link's target. Empty while they may change unseen: when one is
// away, or was written so lately that its clock may not tell another write apart.
std::string stamp_of(const ConnectOptions& options) {
  std::string stamp = "/";
  for (const auto* path : {&options.join_file, &options.ca_file, &options.client_cert_file, &options.client_key_file}) {
    if (path->empty()) continue;
    struct stat found {};
    if (::stat(path->c_str(), &found) != 0 || std::time(nullptr) - found.st_ctim.tv_sec < 2) return "";
    for (const auto each : {static_cast<long>(found.st_ino), static_cast<long>(found.st_size),
                            static_cast<long>(found.st_ctim.tv_sec), static_cast<long>(found.st_ctim.tv_nsec)}) {
      stamp += std::to_string(each) + "/";
    }
  }
  return stamp;
}

double random_up_to(double most) {
  thread_local std::mt19937_64 generator{std::random_device{}()};
  return std::uniform_real_distribution<double>(0, most)(generator);
}

bool is_harmless(const google::protobuf::MethodDescriptor& method) {
  const auto declared = method.options().GetExtension(options::v1::retry);
  return declared == options::v1::RETRY_READ || declared == options::v1::RETRY_IDEMPOTENT;
}

// Who speaks in an rpc: `node`, `trainer`, or nobody.
std::string speaker_of(const google::protobuf::MethodDescriptor& method) {
  switch (method.options().GetExtension(options::v1::speaker)) {
    case options::v1::SPEAKER_NODE:
    case options::v1::SPEAKER_OPENS_NODE:
      return "node";
    case options::v1::SPEAKER_UNSPECIFIED:
      return "";
    default:
      return "trainer";
  }
}

}  // namespace

Seconds RetryPolicy::wait(int attempt, std::optional<std::chrono::nanoseconds> hint) const {
  if (hint) return std::max(Seconds(0.01), Seconds(*hint)) * (1 + random_up_to(0.5));
  const Seconds doubled = first_wait * std::exp2(std::clamp(attempt - 1, 0, 30));
  return std::min(max_wait, doubled) * (0.5 + random_up_to(0.5));
}

// Calls and streams that began over an earlier channel hold it until they end. Files that are not usable are logged and
// leave in force what was before.
class Following {
 public:
  // A channel, and what the files said when it was made.
  struct Opened {
    Said said;
    std::shared_ptr<grpc::Channel> channel;
  };

  Following(const std::string& target, const ConnectOptions& options)
      : target_(target), options_(options), now_(opened(read_all(target, options))) {}

  std::shared_ptr<const Opened> current() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::string stamp = stamp_of(options_);
    if (stamp.empty() || stamp != stamp_) {
      stamp_ = stamp;
      read_again();
    }
    return now_;
  }

  std::string token() {
    if (options_.token_file.empty()) return current()->said.token;
    return without_line_end(file_content(options_.token_file, "token file", "UNAVAILABLE"));
  }

  void answered() {
    const std::lock_guard<std::mutex> lock(mutex_);
    was_reached_ = true;
  }

  bool trust_may_return() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return was_reached_ && !(options_.join_file + options_.ca_file + options_.client_cert_file).empty();
  }

 private:
  static std::shared_ptr<const Opened> opened(Said said) {
    auto channel = grpc::CreateCustomChannel(said.address, said.credentials ? said.credentials : grpc::InsecureChannelCredentials(),
                                             arguments_of(said.server_name));
    return std::make_shared<Opened>(Opened{std::move(said), std::move(channel)});
  }

  void read_again() {
    try {
      Said said = read_all(target_, options_);
      if (said.content != now_->said.content) now_ = opened(std::move(said));
      problem_.clear();
    } catch (const Error& error) {
      if (problem_ != error.what()) gpr_log(GPR_ERROR, "what was before stays in force: %s", error.what());
      problem_ = error.what();
    }
  }

  const std::string target_;
  const ConnectOptions options_;
  std::mutex mutex_;
  std::shared_ptr<const Opened> now_;
  std::string stamp_, problem_;
  bool was_reached_ = false;
};

Client::Client(const std::string& target, const ConnectOptions& options)
    : retry_(options.retry), following_(std::make_shared<Following>(target, options)) {
  sessions_->add(options.session);
}

std::shared_ptr<grpc::Channel> Client::channel() const { return following_->current()->channel; }

Error Client::error_of(const grpc::Status& status) const {
  Error error = typed_error(status);
  if (error.reason() == "UNTRUSTED_SERVER") {
    return following_->trust_may_return() ? Error("UNAVAILABLE", error.what()) : error;
  }
  if (error.kind() != Kind::kRetryable) following_->answered();  // a refusal is an answer
  return error;
}

void Client::Sessions::add(const std::string& credential) {
  const auto begin = credential.find('/') + 1;  // of af1/SPEAKER/…
  const auto end = credential.find('/', begin);
  if (end == std::string::npos) return;
  const std::lock_guard<std::mutex> lock(mutex);
  known[credential.substr(begin, end - begin)] = credential;
}

Client Client::as(const std::string& credential) const {
  Client other(*this);
  other.sessions_ = std::make_shared<Sessions>();
  other.sessions_->add(credential);
  return other;
}

std::unique_ptr<grpc::ClientContext> Client::new_context(const CallOptions& options,
                                                         const google::protobuf::Descriptor* request) const {
  auto context = std::make_unique<grpc::ClientContext>();
  const std::string token = following_->token();
  if (!token.empty()) context->AddMetadata("authorization", "Bearer " + token);
  if (request != nullptr) {
    const std::lock_guard<std::mutex> lock(sessions_->mutex);
    const auto found = sessions_->known.find(speaker_of(method_of(*request)));
    if (found != sessions_->known.end()) context->AddMetadata("astraflow-session", found->second);
  }
  if (!options.correlation_id.empty()) context->AddMetadata("x-correlation-id", options.correlation_id);
  return context;
}

const google::protobuf::MethodDescriptor& Client::method_of(const google::protobuf::Descriptor& request) {
  // Every rpc has a request of its own, in the file of its service.
  for (int s = 0; s < request.file()->service_count(); ++s) {
    for (int m = 0; m < request.file()->service(s)->method_count(); ++m) {
      const auto* method = request.file()->service(s)->method(m);
      if (method->input_type() == &request) return *method;
    }
  }
  refuse(request.full_name() + " is the request of no rpc");
}

void Client::repeat(const google::protobuf::MethodDescriptor& method, const CallOptions& options,
                    const std::function<grpc::Status(grpc::ClientContext*)>& attempt) const {
  const auto started = std::chrono::steady_clock::now();
  for (int failed = 1;; ++failed) {
    const auto context = new_context(options, method.input_type());
    context->set_deadline(std::chrono::system_clock::now() +
                          std::chrono::duration_cast<std::chrono::nanoseconds>(options.timeout));
    const grpc::Status status = attempt(context.get());
    if (status.ok()) return following_->answered();
    const Error error = error_of(status);
    const Seconds wait = retry_.wait(failed, error.retry_after());
    const bool may_help = error.reason() == "UNAVAILABLE" || error.reason() == "PAYLOAD_MISSING";
    const bool is_in_time = std::chrono::steady_clock::now() + wait - started <= retry_.total;
    if (!may_help || !is_in_time || !is_harmless(method)) raise(error);
    std::this_thread::sleep_for(wait);
  }
}

server::v1::ServerInfo Client::server_info(const CallOptions& options) const {
  const auto info = call(&dataflow::v1::AdminService::Stub::GetServerInfo, dataflow::v1::GetServerInfoRequest(), options);
  const server::v1::ServerInfo& server = info.server();
  const uint32_t mine = server.descriptor()->file()->options().GetExtension(options::v1::contract_version);
  const uint32_t oldest = server.oldest_contract_version(), newest = server.contract_version();
  if (oldest <= mine && mine <= newest) return server;
  raise(Error("INCOMPATIBLE", "the server at " + following_->current()->said.address + " (astraflow " + server.product_version() +
                                  ") speaks contract version " + std::to_string(oldest) + " to " + std::to_string(newest) +
                                  ", this client (C++ " + kVersion + ") " + std::to_string(mine) + ": update the " +
                                  (oldest > mine ? "client" : "server")));
}

bool Client::may_come_back(const Error& error) {
  return error.kind() == Kind::kRetryable || error.reason() == "INTERNAL";
}

Seconds Client::reconnect_wait(int failures, std::optional<std::chrono::nanoseconds> hint) {
  return kReconnect.wait(std::max(1, failures), hint);
}

void Client::pause(int failures, std::optional<std::chrono::nanoseconds> hint) {
  std::this_thread::sleep_for(reconnect_wait(failures, hint));
}

}  // namespace astraflow
