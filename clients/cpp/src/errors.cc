#include "astraflow/errors.h"

#include <array>
#include <regex>
#include <utility>

#include "astraflow/cpp/status.pb.h"

namespace astraflow {
namespace {

struct Row {
  const char* reason;
  Kind kind;
  const char* code;
};

constexpr Row kReasons[] = {
    {"UNKNOWN", Kind::kOther, "UNKNOWN"},
    {"UNAVAILABLE", Kind::kRetryable, "UNAVAILABLE"},
    {"DEADLINE_EXCEEDED", Kind::kRetryable, "DEADLINE_EXCEEDED"},
    {"UNKNOWN_VERSION", Kind::kRetryable, "UNAVAILABLE"},
    {"PAYLOAD_MISSING", Kind::kRetryable, "ABORTED"},
    {"RESOURCE_EXHAUSTED", Kind::kRetryable, "RESOURCE_EXHAUSTED"},
    {"INVALID_ARGUMENT", Kind::kRequest, "INVALID_ARGUMENT"},
    {"INVALID_TRAJECTORY", Kind::kRequest, "INVALID_ARGUMENT"},
    {"INVALID_RECIPE", Kind::kRequest, "INVALID_ARGUMENT"},
    {"PLUGIN_FAILED", Kind::kRequest, "FAILED_PRECONDITION"},
    {"NOT_FOUND", Kind::kRequest, "NOT_FOUND"},
    {"UNTRUSTED_SERVER", Kind::kRequest, "UNAVAILABLE"},
    {"FENCED", Kind::kState, "FAILED_PRECONDITION"},
    {"POLICY_HELD", Kind::kState, "FAILED_PRECONDITION"},
    {"LEASE_LOST", Kind::kState, "FAILED_PRECONDITION"},
    {"CONFLICT", Kind::kState, "ALREADY_EXISTS"},
    {"VERSION_GAP", Kind::kState, "FAILED_PRECONDITION"},
    {"FAILED_PRECONDITION", Kind::kState, "FAILED_PRECONDITION"},
    {"INCOMPATIBLE", Kind::kState, "FAILED_PRECONDITION"},
    {"UNAUTHENTICATED", Kind::kOther, "UNAUTHENTICATED"},
    {"PERMISSION_DENIED", Kind::kOther, "PERMISSION_DENIED"},
    {"UNIMPLEMENTED", Kind::kOther, "UNIMPLEMENTED"},
    {"INTERNAL", Kind::kOther, "INTERNAL"},
};

constexpr std::array<const char*, 17> kCodes = {
    "OK",           "CANCELLED",         "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND",    "ALREADY_EXISTS",    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",      "OUT_OF_RANGE",      "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS",    "UNAUTHENTICATED"};

const Row* row_of(const std::string& reason) {
  for (const Row& row : kReasons) {
    if (reason == row.reason) return &row;
  }
  return nullptr;
}

// Whether a status code alone says what the reason of the same name does.
bool speaks_for_itself(grpc::StatusCode code) {
  switch (code) {
    case grpc::UNAVAILABLE:
    case grpc::DEADLINE_EXCEEDED:
    case grpc::RESOURCE_EXHAUSTED:
    case grpc::INVALID_ARGUMENT:
    case grpc::NOT_FOUND:
    case grpc::UNAUTHENTICATED:
    case grpc::PERMISSION_DENIED:
    case grpc::UNIMPLEMENTED:
      return true;
    default:
      return false;
  }
}

std::optional<Error> from_details(const grpc::Status& status) {
  cpp::Status rich;
  if (status.error_details().empty() || !rich.ParseFromString(status.error_details())) return std::nullopt;
  cpp::ErrorInfo info;
  ErrorFacts facts;
  for (const auto& detail : rich.details()) {
    cpp::RetryInfo retry;
    if (detail.type_url() == "type.googleapis.com/google.rpc.ErrorInfo") {
      info.ParseFromString(detail.value());
    } else if (detail.type_url() == "type.googleapis.com/google.rpc.RetryInfo" && retry.ParseFromString(detail.value())) {
      facts.retry_after =
          std::chrono::seconds(retry.retry_delay().seconds()) + std::chrono::nanoseconds(retry.retry_delay().nanos());
    }
  }
  if (info.domain() != "astraflow") return std::nullopt;
  facts.metadata.insert(info.metadata().begin(), info.metadata().end());
  return Error(row_of(info.reason()) ? info.reason() : "INTERNAL", status.error_message(), std::move(facts));
}

Error from_code(const grpc::Status& status) {
  static const std::regex too_large("larger than (max|configured)");
  static const std::regex untrusted("handshake failed|CERTIFICATE_VERIFY_FAILED|WRONG_VERSION_NUMBER|peer certificate");
  const std::string code = kCodes[static_cast<size_t>(status.error_code()) % kCodes.size()];
  const std::string& message = status.error_message();
  const std::string text = code + ": " + (message.empty() ? "the server gave no message" : message);
  if (status.error_code() == grpc::RESOURCE_EXHAUSTED && std::regex_search(message, too_large)) {
    return Error("INVALID_ARGUMENT", text + "; send less in one call: split it, or shorten the episode");
  }
  if (status.error_code() == grpc::UNAVAILABLE && std::regex_search(message, untrusted)) {
    return Error("UNTRUSTED_SERVER", text + "; get the join string or the CA file of this server, and compare the clocks");
  }
  return Error(speaks_for_itself(status.error_code()) ? code : "INTERNAL", text);
}

}  // namespace

Error::Error(std::string reason, const std::string& message, ErrorFacts facts)
    : std::runtime_error(message), reason_(std::move(reason)), facts_(std::move(facts)) {}

Kind Error::kind() const { return row_of(reason_) ? row_of(reason_)->kind : Kind::kOther; }

const char* Error::code() const { return row_of(reason_) ? row_of(reason_)->code : "UNKNOWN"; }

void raise(const Error& error) {
  switch (error.kind()) {
    case Kind::kRetryable:
      throw RetryableError(error.reason(), error.what(), {error.metadata(), error.retry_after()});
    case Kind::kRequest:
      throw RequestError(error.reason(), error.what(), {error.metadata(), error.retry_after()});
    case Kind::kState:
      throw StateError(error.reason(), error.what(), {error.metadata(), error.retry_after()});
    case Kind::kOther:
      break;
  }
  throw error;
}

Error typed_error(const grpc::Status& status) {
  const std::optional<Error> detailed = from_details(status);
  return detailed ? *detailed : from_code(status);
}

}  // namespace astraflow
