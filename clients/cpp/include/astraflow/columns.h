// Per-token columns: views over the little-endian bytes of a Trajectory message, and back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "astraflow/rollout/v1/trajectory.pb.h"

namespace astraflow {

// The columns of one trajectory of T tokens.
struct Columns {
  std::vector<int32_t> token_ids;
  std::vector<bool> loss_mask;  // true where the token is trained on
  std::vector<float> logprobs;  // natural log, at most 0; 0 where the mask is false
  std::vector<rollout::v1::VersionSpan> version_spans;  // ascending; together they cover every masked position
};

// A column of a message that outlives it. Data lies where the message has it, unless that is not aligned.
template <class Element>
class View {
 public:
  View(const Element* data, size_t size, std::vector<Element> copy) : copy_(std::move(copy)), size_(size) {
    data_ = copy_.empty() ? data : copy_.data();
  }
  View(View&&) = default;
  View(const View&) = delete;

  const Element* data() const { return data_; }
  size_t size() const { return size_; }
  const Element* begin() const { return data_; }
  const Element* end() const { return data_ + size_; }
  const Element& operator[](size_t i) const { return data_[i]; }

 private:
  std::vector<Element> copy_;
  const Element* data_;
  size_t size_;
};

// Returns the message for the columns. Throws RequestError (INVALID_TRAJECTORY) when lengths differ.
rollout::v1::Trajectory encode_columns(const Columns& columns, const std::string& trajectory_id);

// Throws RequestError (INVALID_TRAJECTORY) unless the columns of the message belong together. The views below need it.
void require_columns(const rollout::v1::Trajectory& message);

View<int32_t> token_ids(const rollout::v1::Trajectory& message);
// bfloat16 is widened exactly.
View<float> logprobs(const rollout::v1::Trajectory& message);
std::vector<bool> loss_mask(const rollout::v1::Trajectory& message);

}  // namespace astraflow
