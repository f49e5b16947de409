// The error tree of AstraFlow, the same in every language (docs/contracts.md).
//
// Kinds are chosen by what the caller does next; `reason` is a stable slug that travels as google.rpc.ErrorInfo.reason;
// `what` says what was wrong, its value, the limit and the remedy, for people.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include <grpcpp/support/status.h>

namespace astraflow {

// What the caller does next.
enum class Kind {
  kRetryable,  // the same call may succeed later without any change
  kRequest,    // the request is wrong; sending it again will fail again
  kState,      // the world moved on: drop what you hold and start from a fresh read
  kOther,      // none of these
};

struct ErrorFacts {
  // What the server says of it; `correlation_id` finds the call in the server's log.
  std::map<std::string, std::string> metadata;
  // How long the server asks to wait before the next call.
  std::optional<std::chrono::nanoseconds> retry_after;
};

// Base of every error of this library. Thrown as one of the classes below, by its kind.
class Error : public std::runtime_error {
 public:
  Error(std::string reason, const std::string& message, ErrorFacts facts = {});

  // For example `NOT_FOUND`; docs/contracts.md says which rpc answers which.
  const std::string& reason() const { return reason_; }
  Kind kind() const;
  // Name of the status code that the reason travels with.
  const char* code() const;
  const std::map<std::string, std::string>& metadata() const { return facts_.metadata; }
  std::optional<std::chrono::nanoseconds> retry_after() const { return facts_.retry_after; }

 private:
  std::string reason_;
  ErrorFacts facts_;
};

class RetryableError : public Error {
  using Error::Error;
};
class RequestError : public Error {
  using Error::Error;
};
class StateError : public Error {
  using Error::Error;
};

// Throws the error of the class of its kind.
[[noreturn]] void raise(const Error& error);

// Returns what a call that failed becomes: by the reason of its ErrorInfo, else by its status code.
Error typed_error(const grpc::Status& status);

}  // namespace astraflow
