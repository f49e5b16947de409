// Pushing finished episodes over one stream until the server has answered for each.
//
// An episode that `push` took is sent again on every new stream until it is acknowledged (the server recognises
// repetitions); at most the contract's window is unacknowledged; memory is bounded. What is acknowledged in memory only is
// kept until the server's watermark passes it, and pushed again when the server comes back with another data set.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "astraflow/client.h"

namespace astraflow {

// Bounds of a push stream; the window's are the contract's.
struct PushLimits {
  // What is kept, acknowledged episodes included that the server's disk may not have yet.
  size_t max_episodes = 4'096, max_bytes = size_t{1} << 28;
  size_t window_episodes = 128, window_bytes = size_t{1} << 24;
  // How long an acknowledged episode is kept when the server cannot tell what is durable.
  std::chrono::duration<double> retain{3};
};

// One push stream of one run, over the connection of its client. Safe to share between threads.
class PushStream {
 public:
  explicit PushStream(const Client& client, PushLimits limits = {});
  // As `close` without patience.
  ~PushStream();

  // Takes the episode, in the order of the calls; waits while the stream holds all it may. The future has what became of
  // it: an outcome, never an error, for one that the server does not want; the error of a server that refuses the
  // stream. Throws RequestError when the stream is closed.
  std::future<dataflow::v1::PushResult> push(rollout::v1::Episode episode);

  // Waits until everything is acknowledged, and ends the stream. False when something is left, which must be pushed
  // again.
  bool close(std::chrono::duration<double> patience = std::chrono::seconds(10));

  // The server works on this data set, as JoinRun says: with another one than before, what was not durable is pushed
  // again.
  void data_set(const std::string& incarnation);

 private:
  struct Kept;
  using Queue = std::deque<std::shared_ptr<Kept>>;
  using Lock = std::unique_lock<std::mutex>;
  using Opened = grpc::ClientReaderWriter<dataflow::v1::PushRequest, dataflow::v1::PushResponse>;

  void start();
  void run();
  bool converse();
  void write(Opened* opened, const bool* is_over);
  Queue next_to_send(uint64_t sequence);
  void acknowledge(const dataflow::v1::PushResponse& response);
  void answered(const dataflow::v1::PushResult& result);
  void changed_data_set(const std::string& incarnation);
  void refuse(const Error& error);
  void forget_safe();
  bool has_room(size_t size);

  const Client client_;
  const PushLimits limits_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Queue unsent_, in_flight_, acked_;
  std::string data_incarnation_;
  std::optional<uint64_t> durable_position_;
  bool is_running_ = false, is_stopped_ = false;
  grpc::ClientContext* context_ = nullptr;  // of the open stream
  std::thread runner_;
};

}  // namespace astraflow
