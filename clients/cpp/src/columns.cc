#include "astraflow/columns.h"

#include <cstring>

#include "astraflow/errors.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "columns travel in little-endian order, and this client copies them as they are"
#endif

namespace astraflow {
namespace {

using rollout::v1::Trajectory;

[[noreturn]] void mismatch(const std::string& message) {
  raise(Error("INVALID_TRAJECTORY", message, {{{"reason", "length_mismatch"}}, {}}));
}

bool is_half(const Trajectory& message) { return message.logprob_dtype() == rollout::v1::LOGPROB_DTYPE_BF16; }

void require_width(const Trajectory& message, const char* name, const std::string& column, size_t width) {
  if (column.size() % width == 0) return;
  mismatch("trajectory " + message.trajectory_id() + ": " + name + " holds " + std::to_string(column.size()) +
           " bytes, not a multiple of " + std::to_string(width));
}

template <class Element>
View<Element> view(const std::string& column) {
  const size_t size = column.size() / sizeof(Element);
  if (reinterpret_cast<uintptr_t>(column.data()) % alignof(Element) == 0) {
    return View<Element>(reinterpret_cast<const Element*>(column.data()), size, {});
  }
  std::vector<Element> copy(size);
  std::memcpy(copy.data(), column.data(), column.size());
  return View<Element>(nullptr, size, std::move(copy));
}

template <class Element>
std::string bytes_of(const std::vector<Element>& column) {
  return std::string(reinterpret_cast<const char*>(column.data()), column.size() * sizeof(Element));
}

}  // namespace

Trajectory encode_columns(const Columns& columns, const std::string& trajectory_id) {
  const size_t num_tokens = columns.token_ids.size();
  if (num_tokens == 0 || columns.loss_mask.size() != num_tokens || columns.logprobs.size() != num_tokens) {
    mismatch("columns of " + trajectory_id + " must have one length ≥ 1, got " + std::to_string(num_tokens) +
             " token ids, " + std::to_string(columns.loss_mask.size()) + " of the loss mask and " +
             std::to_string(columns.logprobs.size()) + " log-probs");
  }
  std::string mask((num_tokens + 7) / 8, '\0');
  for (size_t t = 0; t < num_tokens; ++t) {
    if (columns.loss_mask[t]) mask[t / 8] = static_cast<char>(mask[t / 8] | 1 << t % 8);
  }
  Trajectory message;
  message.set_trajectory_id(trajectory_id);
  message.set_token_ids(bytes_of(columns.token_ids));
  message.set_logprob_dtype(rollout::v1::LOGPROB_DTYPE_F32);
  message.set_logprobs(bytes_of(columns.logprobs));
  message.set_loss_mask(mask);
  message.mutable_version_spans()->Add(columns.version_spans.begin(), columns.version_spans.end());
  return message;
}

void require_columns(const Trajectory& message) {
  const size_t width = is_half(message) ? 2 : 4;
  require_width(message, "token_ids", message.token_ids(), 4);
  require_width(message, "logprobs", message.logprobs(), width);
  const size_t num_tokens = message.token_ids().size() / 4, num_logprobs = message.logprobs().size() / width;
  const size_t mask_bytes = (num_tokens + 7) / 8;
  if (num_logprobs == num_tokens && message.loss_mask().size() == mask_bytes) return;
  mismatch("trajectory " + message.trajectory_id() + ": " + std::to_string(num_tokens) + " token ids, " +
           std::to_string(num_logprobs) + " log-probs and " + std::to_string(message.loss_mask().size()) +
           " mask bytes do not belong together; expected equal counts and " + std::to_string(mask_bytes) + " mask bytes");
}

View<int32_t> token_ids(const Trajectory& message) { return view<int32_t>(message.token_ids()); }

View<float> logprobs(const Trajectory& message) {
  if (!is_half(message)) return view<float>(message.logprobs());
  const View<uint16_t> halves = view<uint16_t>(message.logprobs());
  std::vector<float> wide(halves.size());
  for (size_t t = 0; t < wide.size(); ++t) {
    const uint32_t bits = static_cast<uint32_t>(halves[t]) << 16;
    std::memcpy(&wide[t], &bits, sizeof bits);
  }
  const size_t size = wide.size();
  return View<float>(nullptr, size, std::move(wide));
}

std::vector<bool> loss_mask(const Trajectory& message) {
  std::vector<bool> mask(message.token_ids().size() / 4);
  for (size_t t = 0; t < mask.size(); ++t) mask[t] = message.loss_mask()[t / 8] >> t % 8 & 1;
  return mask;
}

}  // namespace astraflow
