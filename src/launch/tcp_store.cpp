#include "launch/tcp_store.h"

#include <signal.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <future>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/text.h"

namespace fsdp::detail {

namespace {

constexpr const char* kLoopback = "127.0.0.1";
constexpr auto kGrace = std::chrono::seconds(1); // so that c10d can say itself what is wrong

// c10d writes to the store's socket without MSG_NOSIGNAL, so the end of the server
// would kill its clients by SIGPIPE. (In Python the interpreter ignores the signal.)
void ignore_broken_pipes() {
  struct sigaction current{};
  if (sigaction(SIGPIPE, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) {
    signal(SIGPIPE, SIG_IGN);
  }
}

} // namespace

Endpoint parse_endpoint(const std::string& text, const std::string& what) {
  const auto colon = text.rfind(':');
  FSDP_CHECK_AS(
      ConfigError, colon != std::string::npos && colon > 0, what, " '", text,
      "' must be host:port");
  const auto port = parse_int(text.substr(colon + 1), "the port of " + what + " '" + text + "'");
  FSDP_CHECK_AS(
      ConfigError, port > 0 && port < 65536, what, " '", text, "': ", port, " is not a port");
  auto host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  return {host, static_cast<uint16_t>(port)};
}

c10::intrusive_ptr<c10d::Store> serve_store(Endpoint& endpoint, bool one_machine) {
  // The stores are kept to the end of the process. Otherwise a rank that joins its next world could
  // reach the last world's store while that ends.
  static std::mutex mutex;
  static std::map<std::pair<uint16_t, bool>, c10::intrusive_ptr<c10d::Store>> served;
  std::lock_guard lock(mutex);
  ignore_broken_pipes();
  if (one_machine) {
    endpoint.host = kLoopback;
  }
  if (const auto found = served.find({endpoint.port, one_machine}); found != served.end()) {
    return found->second;
  }
  auto listener = listen_on(one_machine ? kLoopback : "", endpoint.port);
  endpoint.port = listener.port;
  c10d::TCPStoreOptions options;
  options.port = listener.port;
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = listener.fd.get();
  auto store = c10::make_intrusive<c10d::TCPStore>(kLoopback, options);
  listener.fd.release(); // the store closes the socket
  served[{endpoint.port, one_machine}] = store;
  return store;
}

c10::intrusive_ptr<c10d::Store> connect_store(
    const Endpoint& endpoint, std::chrono::milliseconds timeout) {
  ignore_broken_pipes();
  c10d::TCPStoreOptions options;
  options.port = endpoint.port;
  options.waitWorkers = false;
  options.timeout = timeout;
  // A store on the loopback address listens on IPv4 only.
  const auto host = is_loopback(endpoint.host) ? kLoopback : endpoint.host;
  // If another program listens there and does not answer, c10d waits for ever. So another thread
  // connects. If it gets no answer, it is left behind.
  std::packaged_task<c10::intrusive_ptr<c10d::Store>()> connect(
      [host, options] { return c10::make_intrusive<c10d::TCPStore>(host, options); });
  auto connected = connect.get_future();
  std::thread(std::move(connect)).detach();
  std::string reason = "a program listens there, but it does not answer";
  try {
    if (connected.wait_for(timeout + kGrace) == std::future_status::ready) {
      return connected.get();
    }
  } catch (...) {
    reason = current_exception_text();
  }
  FSDP_THROW(
      CommError, "no store answers at ", endpoint.host, ":", endpoint.port, " within ",
      timeout.count(), " ms: is rank 0 running, and is this its address? (", reason, ")");
}

} // namespace fsdp::detail
