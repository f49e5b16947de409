// The client of the dataflow server: calls that throw typed errors and repeat what the contract says is harmless.
//
//   astraflow::Client client(target);  // HOST:PORT, or a join string
//   auto answer = client.call(&RunService::Stub::GetRun, GetRunRequest());
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include <grpcpp/grpcpp.h>

#include "astraflow/dataflow/v1/admin_service.grpc.pb.h"
#include "astraflow/dataflow/v1/batch_service.grpc.pb.h"
#include "astraflow/dataflow/v1/run_service.grpc.pb.h"
#include "astraflow/dataflow/v1/task_service.grpc.pb.h"
#include "astraflow/dataflow/v1/trajectory_service.grpc.pb.h"
#include "astraflow/dataflow/v1/version_service.grpc.pb.h"
#include "astraflow/errors.h"
#include "astraflow/server/v1/server_info.pb.h"

namespace astraflow {

// Release of this library.
inline constexpr char kVersion[] = "0.3.0";

// How often, and for how long, a harmless call is repeated while the server is unreachable. No attempt starts later than
// `total` after the first one. Waits double from `first_wait` up to `max_wait`, each shortened at random by up to half. A
// wait that the server asks for takes their place, lengthened at random by up to half.
struct RetryPolicy {
  std::chrono::duration<double> total{30};
  std::chrono::duration<double> first_wait{0.05};
  std::chrono::duration<double> max_wait{2};

  // How long to wait after failed attempt number `attempt`, counted from 1.
  std::chrono::duration<double> wait(int attempt, std::optional<std::chrono::nanoseconds> hint) const;
};

// How to reach a server, beside its address. A join string says most of it itself; what is set here comes first. Files are
// read again when they change, for the calls from then on.
struct ConnectOptions {
  std::string join_file;    // holds a join string; in place of a target, which is then empty
  std::string token;        // sent as bearer token
  std::string token_file;   // in place of it: read again for each call, so that it can be replaced
  std::string ca_file;      // PEM: use TLS and trust these authorities, and no other
  bool public_ca = false;   // use TLS and trust the authorities that this machine trusts
  std::string server_name;  // that the certificate must carry; empty takes the host of the address
  std::string client_cert_file, client_key_file;  // shown to a server that asks for a certificate
  bool insecure = false;  // send the token without TLS, to whoever listens on the way; for closed test networks only
  RetryPolicy retry;
  // What JoinRun returned before a restart of the process, so that the node is still itself; a secret.
  std::string session;
};

struct CallOptions {
  // Deadline of each attempt of a unary call; streams have none.
  std::chrono::duration<double> timeout{10};
  // The server writes it on each log line of the call: 1 to 64 printable ASCII characters.
  std::string correlation_id;
};

// A client's channel as its files say now.
class Following;

// What a server-streaming rpc sends. Leaving it, by its destructor, ends the call.
template <class Response>
class Stream {
 public:
  Stream(std::unique_ptr<grpc::ClientContext> context, std::unique_ptr<grpc::ClientReader<Response>> reader,
         std::function<Error(const grpc::Status&)> error_of = typed_error)
      : context_(std::move(context)), reader_(std::move(reader)), error_of_(std::move(error_of)) {}
  Stream(Stream&&) = default;
  ~Stream() {
    if (!reader_) return;
    context_->TryCancel();
    reader_->Finish();
  }

  // Reads the next message; false when the server closed the stream. Throws its error.
  bool next(Response* message) {
    if (!reader_) return false;
    if (reader_->Read(message)) return true;
    const grpc::Status status = std::exchange(reader_, nullptr)->Finish();
    if (!status.ok()) raise(error_of_(status));
    return false;
  }

  // Ends the call; may be called while another thread waits in `next`.
  void cancel() { context_->TryCancel(); }

 private:
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::ClientReader<Response>> reader_;
  std::function<Error(const grpc::Status&)> error_of_;
};

// One connection to one dataflow server, made by the first call. Safe to share between threads. It speaks as the node
// that it joined last, and as the trainer of its last claim; `as` makes one for each of several.
class Client {
 public:
  // Throws RequestError for a target or options that do not fit.
  explicit Client(const std::string& target, const ConnectOptions& options = {});

  // Calls a unary rpc. Throws Error.
  template <class Stub, class Request, class Response>
  Response call(grpc::Status (Stub::*rpc)(grpc::ClientContext*, const Request&, Response*), const Request& request,
                const CallOptions& options = {}) const {
    Response response;
    repeat(method_of(*Request::descriptor()), options, [&](grpc::ClientContext* context) {
      Stub stub(channel());
      return (stub.*rpc)(context, request, &response);
    });
    constexpr bool kJoins = std::is_same_v<Response, dataflow::v1::JoinRunResponse>;
    if constexpr (kJoins || std::is_same_v<Response, dataflow::v1::ClaimPolicyResponse>) {
      sessions_->add(response.session());
    }
    return response;
  }

  // Opens a server stream. Throws Error when its messages are read.
  template <class Stub, class Request, class Response>
  Stream<Response> stream(std::unique_ptr<grpc::ClientReader<Response>> (Stub::*rpc)(grpc::ClientContext*, const Request&),
                          const Request& request, const CallOptions& options = {}) const {
    Stub stub(channel());
    auto context = new_context(options, Request::descriptor());
    auto reader = (stub.*rpc)(context.get(), request);
    return Stream<Response>(std::move(context), std::move(reader),
                            [client = *this](const grpc::Status& status) { return client.error_of(status); });
  }

  // Calls `each` with what a server stream sends until it returns false, and opens the stream anew when it is lost or
  // the server closes it. Throws the error of a server that refuses or was never reached.
  template <class Stub, class Request, class Response>
  void follow(std::unique_ptr<grpc::ClientReader<Response>> (Stub::*rpc)(grpc::ClientContext*, const Request&),
              const Request& request, const std::function<bool(const Response&)>& each,
              const CallOptions& options = {}) const {
    bool was_reached = false;
    for (int failures = 0;;) {
      std::optional<std::chrono::nanoseconds> hint;
      try {
        Stream<Response> opened = stream(rpc, request, options);
        for (Response message; opened.next(&message); failures = 0, was_reached = true) {
          if (!each(message)) return;
        }
      } catch (const Error& error) {
        if (!was_reached || !may_come_back(error)) throw;
        ++failures;
        hint = error.retry_after();
      }
      pause(failures, hint);
    }
  }

  // A client over the same connection that speaks as the holder of a credential of JoinRun or ClaimPolicy.
  Client as(const std::string& credential) const;

  // Asks the server who it is; needs no token. Throws StateError (INCOMPATIBLE) when this client cannot talk to it.
  server::v1::ServerInfo server_info(const CallOptions& options = {}) const;

  // For what this class does not do: a context with the token, for a stub of one's own on the channel. With the type of
  // the request, also with the credential of the node or trainer that speaks in its rpc.
  std::unique_ptr<grpc::ClientContext> new_context(const CallOptions& options = {},
                                                   const google::protobuf::Descriptor* request = nullptr) const;
  // The channel as files say now; ask for each call.
  std::shared_ptr<grpc::Channel> channel() const;
  // The error of a call. A server that is not trusted any more, where files may bring its new authority, is UNAVAILABLE.
  Error error_of(const grpc::Status& status) const;

  // Whether a stream that failed so is opened anew: the server is away, or has a defect; it did not refuse.
  static bool may_come_back(const Error& error);
  // How long to wait before a stream is opened anew.
  static std::chrono::duration<double> reconnect_wait(int failures, std::optional<std::chrono::nanoseconds> hint);

 private:
  // Credentials by who speaks, `node` or `trainer`: the newest that calls returned.
  struct Sessions {
    void add(const std::string& credential);

    std::mutex mutex;
    std::map<std::string, std::string> known;
  };

  static const google::protobuf::MethodDescriptor& method_of(const google::protobuf::Descriptor& request);
  static void pause(int failures, std::optional<std::chrono::nanoseconds> hint);
  void repeat(const google::protobuf::MethodDescriptor& method, const CallOptions& options,
              const std::function<grpc::Status(grpc::ClientContext*)>& attempt) const;

  RetryPolicy retry_;
  std::shared_ptr<Sessions> sessions_ = std::make_shared<Sessions>();
  std::shared_ptr<Following> following_;
};

}  // namespace astraflow
