#include "astraflow/client.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <random>
#include <thread>

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

// What a target and options say together.
Join joined(const std::string& target, const ConnectOptions& options) {
  Join join;
  if (is_join(target)) {
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

std::shared_ptr<grpc::ChannelCredentials> credentials_of(const Join& join, const ConnectOptions& options) {
  grpc::SslCredentialsOptions tls;
  tls.pem_root_certs = options.ca_file.empty() ? join.ca_pem() : file_content(options.ca_file, "CA file");
  if (tls.pem_root_certs.empty() && !join.public_ca) return nullptr;
  if (!options.client_cert_file.empty()) {
    tls.pem_cert_chain = file_content(options.client_cert_file, "client certificate");
    tls.pem_private_key = file_content(options.client_key_file, "client key");
  }
  return grpc::SslCredentials(tls);
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

Client::Client(const std::string& target, const ConnectOptions& options) : retry_(options.retry) {
  const Join join = joined(target, options);
  address_ = join.address;
  auto credentials = credentials_of(join, options);
  token_ = [token = join.token, path = options.token_file] {
    return path.empty() ? token : without_line_end(file_content(path, "token file", "UNAVAILABLE"));
  };
  const bool has_token = !join.token.empty() || !options.token_file.empty();
  if (!credentials && (!join.server_name.empty() || !options.client_cert_file.empty())) {
    refuse("a server name and a client certificate are for TLS; say whom to trust: a CA file, or public_ca");
  }
  if (has_token && !credentials && !options.insecure && !is_loopback(address_)) {
    refuse("the token for " + address_ + " would travel in the clear; say whom to trust (a join string, a CA file, or " +
           "public_ca), or accept the risk with insecure");
  }
  sessions_->add(options.session);
  channel_ = grpc::CreateCustomChannel(address_, credentials ? credentials : grpc::InsecureChannelCredentials(),
                                       arguments_of(join.server_name));
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
  const std::string token = token_();
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
    if (status.ok()) return;
    const Error error = typed_error(status);
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
  raise(Error("INCOMPATIBLE", "the server at " + address_ + " (astraflow " + server.product_version() +
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
