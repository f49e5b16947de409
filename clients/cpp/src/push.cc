#include "astraflow/push.h"

#include <algorithm>
#include <utility>

namespace astraflow {
namespace {

using Clock = std::chrono::steady_clock;
using dataflow::v1::PushRequest;
using dataflow::v1::PushResponse;
using dataflow::v1::PushResult;
using dataflow::v1::TrajectoryService;

// Episodes of one push, by the contract.
constexpr size_t kMaxPack = 64;
// For what becomes safe by time alone.
constexpr auto kLongestWait = std::chrono::milliseconds(250);

}  // namespace

struct PushStream::Kept {
  rollout::v1::Episode episode;
  size_t size;
  std::promise<PushResult> promise;
  bool is_answered = false;  // pushed again after a loss of data: its caller has an answer
  uint64_t sequence = 0;  // of the push of the stream of now that it went with
  uint64_t position = 0;
  Clock::time_point acked_at;

  static size_t sum(const Queue& queue) {
    size_t bytes = 0;
    for (const auto& kept : queue) bytes += kept->size;
    return bytes;
  }
};

PushStream::PushStream(const Client& client, PushLimits limits) : client_(client), limits_(limits) {}

PushStream::~PushStream() { close(std::chrono::seconds(0)); }

std::future<PushResult> PushStream::push(rollout::v1::Episode episode) {
  auto kept = std::make_shared<Kept>();
  kept->size = episode.ByteSizeLong();
  kept->episode = std::move(episode);
  Lock lock(mutex_);
  while (!is_stopped_ && !has_room(kept->size)) changed_.wait_for(lock, kLongestWait);
  if (is_stopped_) raise(Error("INVALID_ARGUMENT", "the push stream is closed; open another one"));
  unsent_.push_back(kept);
  start();
  return kept->promise.get_future();
}

bool PushStream::close(std::chrono::duration<double> patience) {
  Lock lock(mutex_);
  changed_.wait_for(lock, patience, [this] { return unsent_.empty() && in_flight_.empty(); });
  is_stopped_ = true;
  if (context_) context_->TryCancel();
  changed_.notify_all();
  lock.unlock();
  if (runner_.joinable()) runner_.join();
  const bool is_done = unsent_.empty() && in_flight_.empty();
  refuse(Error("UNAVAILABLE", "the push stream was closed before the server answered; push the episode again"));
  return is_done;
}

void PushStream::data_set(const std::string& incarnation) {
  const Lock lock(mutex_);
  changed_data_set(incarnation);
}

void PushStream::start() {
  if (!is_running_ && !is_stopped_) {
    if (runner_.joinable()) runner_.join();
    is_running_ = true;
    runner_ = std::thread(&PushStream::run, this);
  }
  changed_.notify_all();
}

void PushStream::run() {
  for (int failures = 0;;) {
    std::optional<std::chrono::nanoseconds> hint;
    try {
      if (converse()) failures = 0;
    } catch (const Error& error) {
      Lock lock(mutex_);
      if (!is_stopped_ && !Client::may_come_back(error)) {
        lock.unlock();
        return refuse(error);
      }
      ++failures;
      hint = error.retry_after();
    }
    Lock lock(mutex_);
    if (changed_.wait_for(lock, Client::reconnect_wait(failures, hint), [this] { return is_stopped_; })) return;
  }
}

// One stream: a thread writes what fits the window, this one reads acknowledgements. Returns whether there were any.
bool PushStream::converse() {
  const auto context = client_.new_context({}, PushRequest::descriptor());
  const auto stub = TrajectoryService::NewStub(client_.channel());
  {
    const Lock lock(mutex_);
    if (is_stopped_) return false;
    context_ = context.get();
  }
  const auto opened = stub->Push(context.get());
  bool is_over = false;
  std::thread writer(&PushStream::write, this, opened.get(), &is_over);
  bool was_answered = false;
  std::optional<Error> wrong;
  try {
    for (PushResponse response; opened->Read(&response); was_answered = true) acknowledge(response);
  } catch (const Error& error) {
    wrong = error;
    context->TryCancel();
  }
  {
    const Lock lock(mutex_);
    context_ = nullptr;
    is_over = true;
    changed_.notify_all();
  }
  writer.join();
  const grpc::Status status = opened->Finish();
  const Lock lock(mutex_);
  // On the next stream in the old order: the server recognises what it has.
  unsent_.insert(unsent_.begin(), in_flight_.begin(), in_flight_.end());
  in_flight_.clear();
  if (!wrong && !status.ok() && !is_stopped_) wrong = client_.error_of(status);
  if (wrong && !(was_answered && Client::may_come_back(*wrong))) throw *wrong;
  return was_answered;
}

void PushStream::write(Opened* opened, const bool* is_over) {
  for (uint64_t sequence = 1;; ++sequence) {
    Queue next;
    {
      Lock lock(mutex_);
      changed_.wait(lock, [&] { return *is_over || !(next = next_to_send(sequence)).empty(); });
    }
    if (next.empty()) return;
    PushRequest request;
    request.set_sequence(sequence);
    for (const auto& kept : next) *request.add_episodes() = kept->episode;  // nobody changes it any more
    if (!opened->Write(request)) return;  // the reader learns why
  }
}

// What waits and fits the window: it goes together, and costs the server one commit.
PushStream::Queue PushStream::next_to_send(uint64_t sequence) {
  Queue next;
  for (size_t bytes = Kept::sum(in_flight_); !unsent_.empty() && next.size() < kMaxPack; bytes += next.back()->size) {
    const auto kept = unsent_.front();
    const bool is_full = in_flight_.size() >= limits_.window_episodes || bytes + kept->size > limits_.window_bytes;
    if (!in_flight_.empty() && is_full) break;
    unsent_.pop_front();
    kept->sequence = sequence;
    in_flight_.push_back(kept);
    next.push_back(kept);
  }
  return next;
}

void PushStream::acknowledge(const PushResponse& response) {
  const Lock lock(mutex_);
  const auto is_later = [&](const auto& kept) { return kept->sequence > response.sequence(); };
  const auto expected = std::find_if(in_flight_.begin(), in_flight_.end(), is_later) - in_flight_.begin();
  if (expected == 0 || in_flight_[static_cast<size_t>(expected) - 1]->sequence != response.sequence() ||
      response.results_size() != expected) {
    throw Error("INTERNAL", "the server acknowledged " + std::to_string(response.results_size()) +
                                " episodes up to push " + std::to_string(response.sequence()) + ", expected " +
                                std::to_string(expected));
  }
  changed_.notify_all();
  for (const PushResult& result : response.results()) {
    if (result.outcome() == dataflow::v1::OUTCOME_RETRY) {
      throw Error("UNAVAILABLE", result.reason() + ": " + result.detail());
    }
    answered(result);
  }
  if (response.has_watermark()) {
    changed_data_set(response.watermark().data_incarnation());
    durable_position_ = response.watermark().durable_position();
    forget_safe();
  }
}

void PushStream::answered(const PushResult& result) {
  const auto kept = in_flight_.front();
  in_flight_.pop_front();
  if (!std::exchange(kept->is_answered, true)) kept->promise.set_value(result);
  if (result.outcome() != dataflow::v1::OUTCOME_REFUSED && result.durability() < dataflow::v1::DURABILITY_FSYNCED) {
    kept->position = result.position();
    kept->acked_at = Clock::now();
    acked_.push_back(kept);
  }
}

void PushStream::changed_data_set(const std::string& incarnation) {
  const std::string before = std::exchange(data_incarnation_, incarnation);
  if (before.empty() || before == incarnation) return;
  durable_position_.reset();  // positions of the lost data set mean nothing in the new one
  unsent_.insert(unsent_.begin(), acked_.begin(), acked_.end());
  acked_.clear();
  if (!unsent_.empty()) start();
}

// Ends the stream: everybody who waits gets the reason, the next push opens another one.
void PushStream::refuse(const Error& error) {
  const Lock lock(mutex_);
  is_running_ = false;
  for (Queue* queue : {&in_flight_, &unsent_}) {
    for (const auto& kept : *queue) {
      if (std::exchange(kept->is_answered, true)) continue;
      try {
        raise(error);
      } catch (...) {
        kept->promise.set_exception(std::current_exception());
      }
    }
    queue->clear();
  }
  changed_.notify_all();
}

void PushStream::forget_safe() {
  const auto before = Clock::now() - limits_.retain;
  while (!acked_.empty()) {
    const Kept& oldest = *acked_.front();
    const bool is_told = durable_position_ && oldest.position > 0;
    if (is_told ? oldest.position > *durable_position_ : oldest.acked_at >= before) return;
    acked_.pop_front();
  }
}

bool PushStream::has_room(size_t size) {
  forget_safe();
  const size_t count = unsent_.size() + in_flight_.size() + acked_.size();
  const size_t bytes = Kept::sum(unsent_) + Kept::sum(in_flight_) + Kept::sum(acked_);
  return count == 0 || (count < limits_.max_episodes && bytes + size <= limits_.max_bytes);
}

}  // namespace astraflow
