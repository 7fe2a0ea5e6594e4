#pragma once

#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace fsdp::test {

/// Two network namespaces that a veth pair connects. For the network they are two hosts. The
/// destructor removes them.
class TwoHosts {
 public:
  TwoHosts() {
    const auto id = std::to_string(getpid() % 100000);
    for (const auto* letter : {"a", "b"}) {
      names_.push_back("fsdp" + id + letter);
    }
    const auto link = [&](int host) { return "fs" + id + (host ? "b" : "a"); };
    made_ = run("ip netns add " + names_[0]) && run("ip netns add " + names_[1]) &&
            run("ip link add " + link(0) + " netns " + names_[0] + " type veth peer name " +
                link(1) + " netns " + names_[1]);
    for (int host = 0; made_ && host < 2; ++host) {
      const auto in = "ip -n " + names_[host] + " ";
      made_ = run(in + "addr add " + address(host) + "/24 dev " + link(host)) &&
              run(in + "link set lo up") && run(in + "link set " + link(host) + " up");
    }
  }
  ~TwoHosts() {
    for (const auto& name : names_) {
      run("ip netns del " + name);
    }
  }
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  /// False if namespaces are not permitted or `ip` is missing.
  bool made() const {
    return made_;
  }
  static std::string address(int host) {
    return "10.213.7." + std::to_string(host + 1);
  }
  /// The command that runs `words` on a host.
  std::vector<std::string> on(int host, std::vector<std::string> words) const {
    std::vector<std::string> command{"ip", "netns", "exec", names_[host]};
    command.insert(command.end(), words.begin(), words.end());
    return command;
  }

 private:
  static bool run(const std::string& command) {
    return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
  }

  std::vector<std::string> names_;
  bool made_ = false;
};

} // namespace fsdp::test
