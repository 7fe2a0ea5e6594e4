#include "launch/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/check.h"

namespace fsdp::detail {

namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList resolve(const std::string& host, uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(
      host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found);
  FSDP_CHECK_AS(
      CommError, error == 0, "host '", host, "' cannot be resolved: ", gai_strerror(error));
  return {found, &freeaddrinfo};
}

bool is_loopback_address(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return (ntohl(v4.sin_addr.s_addr) >> 24) == 127;
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  return address.sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr);
}

std::string numeric(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST];
  const int error = getnameinfo(address, length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  FSDP_CHECK_AS(CommError, error == 0, "an address cannot be written: ", gai_strerror(error));
  return text;
}

uint16_t bound_port(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(
      address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                    : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

Fd begin_connect(const addrinfo& to) {
  Fd fd(socket(to.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const bool begun = connect(fd.get(), to.ai_addr, to.ai_addrlen) == 0 || errno == EINPROGRESS;
  return begun ? std::move(fd) : Fd();
}

} // namespace

bool is_loopback(const std::string& host) {
  // The name is not looked up: many machines map their own name to 127.0.1.1,
  // although other machines reach them under that name.
  in6_addr v6{};
  return host == "localhost" || host.rfind("127.", 0) == 0 ||
         (inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6));
}

Listener listen_on(const std::string& host, uint16_t port) {
  const auto list = resolve(host, port, AI_PASSIVE);
  int last_error = 0;
  // For all addresses IPv6 comes first, because its socket accepts IPv4 connections too.
  for (const int family : {host.empty() ? AF_INET6 : AF_INET, host.empty() ? AF_INET : AF_INET6}) {
    for (const auto* item = list.get(); item; item = item->ai_next) {
      if (item->ai_family != family) {
        continue;
      }
      Fd fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
      const int yes = 1;
      const int no = 0;
      setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
      if (family == AF_INET6) {
        setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no));
      }
      if (fd.get() >= 0 && bind(fd.get(), item->ai_addr, item->ai_addrlen) == 0 &&
          listen(fd.get(), 4096) == 0) {
        const auto bound = bound_port(fd.get());
        return {std::move(fd), bound};
      }
      last_error = errno;
    }
  }
  FSDP_CHECK_AS(
      CommError, last_error != EADDRINUSE, "port ", port, " is already in use",
      host.empty() ? "" : " on " + host,
      ": another job, or an earlier run of this one, still listens there; set MASTER_PORT (or the "
      "port in tcp://) to a free one");
  FSDP_THROW(
      CommError, "cannot listen on ", host.empty() ? "any address" : host, ", port ", port, ": ",
      std::strerror(last_error));
}

std::string address_for_peers(const std::string& peer) {
  if (!peer.empty()) {
    const auto list = resolve(peer, 1, 0);
    for (const auto* item = list.get(); item; item = item->ai_next) {
      // Connecting a datagram socket sends nothing: it only picks the route.
      Fd fd(socket(item->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
      sockaddr_storage address{};
      socklen_t length = sizeof(address);
      auto* plain = reinterpret_cast<sockaddr*>(&address);
      if (fd.get() >= 0 && connect(fd.get(), item->ai_addr, item->ai_addrlen) == 0 &&
          getsockname(fd.get(), plain, &length) == 0 && !is_loopback_address(*plain)) {
        return numeric(plain, length);
      }
    }
  }
  // There is no peer, or it is this machine under a loopback name: any address will do.
  ifaddrs* found = nullptr;
  getifaddrs(&found);
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> interfaces(found, &freeifaddrs);
  for (const auto* item = found; item; item = item->ifa_next) {
    if (item->ifa_addr && item->ifa_addr->sa_family == AF_INET && (item->ifa_flags & IFF_UP) &&
        !is_loopback_address(*item->ifa_addr)) {
      return numeric(item->ifa_addr, sizeof(sockaddr_in));
    }
  }
  FSDP_THROW(CommError, "this machine has no network address that other machines could reach");
}

Fd connect_to(const std::string& host, uint16_t port, std::chrono::milliseconds timeout) {
  const auto list = resolve(host, port, 0);
  for (const auto* item = list.get(); item; item = item->ai_next) {
    auto fd = begin_connect(*item);
    if (wait_connected(fd, std::chrono::steady_clock::now() + timeout)) {
      return fd;
    }
  }
  return Fd();
}

Fd begin_connect(const std::string& address, uint16_t port) {
  return begin_connect(*resolve(address, port, AI_NUMERICHOST));
}

bool wait_connected(const Fd& connection, std::chrono::steady_clock::time_point deadline) {
  using std::chrono::milliseconds;
  const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
  const auto patience = static_cast<int>(std::max(left, milliseconds(0)).count());
  pollfd waiting{.fd = connection.get(), .events = POLLOUT, .revents = 0};
  int error = 0;
  socklen_t length = sizeof(error);
  return connection.get() >= 0 && poll(&waiting, 1, patience) > 0 &&
         getsockopt(connection.get(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
}

bool is_connected(const Fd& connection) {
  pollfd state{.fd = connection.get(), .events = POLLIN | POLLRDHUP, .revents = 0};
  return connection.get() >= 0 && poll(&state, 1, 0) == 0;
}

} // namespace fsdp::detail
