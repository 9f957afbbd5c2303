// A Vulkan device: its queue, memory and pipelines.
#ifndef KVQ_VULKAN_DEVICE_H_
#define KVQ_VULKAN_DEVICE_H_

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernel_code.h"
#include "limits.h"
#include "memory.h"

namespace kvq {

class Stream;

// Who reads a buffer's memory, and who writes it.
enum class MemoryUse { kDevice, kUpload, kReadBack };

// A kernel on a device; like the device itself it lives as long as the process.
struct Pipeline {
  VkPipeline handle = VK_NULL_HANDLE;
  VkPipelineLayout layout = VK_NULL_HANDLE;
  VkDescriptorSetLayout descriptors = VK_NULL_HANDLE;
};

class Device {
 public:
  Device(int id, VkPhysicalDevice physical, Limits limits);
  ~Device();

  const Limits& limits() const { return limits_; }
  VkDevice handle() const { return device_; }
  VkQueue queue() const { return queue_; }
  uint32_t queue_family() const { return queue_family_; }

  // Whoever uses what follows holds this.
  std::mutex& mutex() { return mutex_; }
  AddressSpace& addresses() { return addresses_; }
  Stream& stream() { return *stream_; }

  std::unique_ptr<Buffer> CreateBuffer(uint64_t bytes, MemoryUse use);
  void DestroyBuffer(const Buffer& buffer);
  Pipeline CreatePipeline(const KernelCode& code);

  // Throws if the device cannot run a kernel.
  void CheckRuns(const KernelCode& code) const;
  // Throws if a call failed; a device that was lost stays so.
  void Check(VkResult result, const char* call);
  // Throws if the device was lost.
  void CheckAlive() const;
  void MarkLost() { lost_ = true; }

  // Bytes of device memory in all, and those that can still be had: what the driver says of all processes,
  // else what this one has not taken.
  uint64_t TotalMemory() const;
  uint64_t FreeMemory() const;
  std::string Describe() const;

 private:
  uint32_t MemoryType(uint32_t allowed, MemoryUse use) const;
  bool Unified() const;

  int id_;
  VkPhysicalDevice physical_;
  Limits limits_;
  VkPhysicalDeviceMemoryProperties memory_{};
  uint32_t queue_family_ = 0;
  VkDevice device_ = VK_NULL_HANDLE;
  VkQueue queue_ = VK_NULL_HANDLE;
  VkPipelineCache pipeline_cache_ = VK_NULL_HANDLE;
  std::mutex mutex_;
  AddressSpace addresses_;
  std::unique_ptr<Stream> stream_;
  uint64_t allocated_ = 0;
  bool lost_ = false;
};

// The devices of this machine, found once. A device is opened when it is first asked for.
class Devices {
 public:
  static Devices& Get();
  int count() const { return static_cast<int>(physical_.size()); }
  const Limits& limits(int id) const { return limits_.at(id); }
  // Throws if there is none of that number.
  Device& Open(int id);
  // Why there are no devices.
  const std::string& problem() const { return problem_; }

 private:
  Devices();

  std::string problem_;
  std::vector<VkPhysicalDevice> physical_;
  std::vector<Limits> limits_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Device>> opened_;
};

}  // namespace kvq

#endif  // KVQ_VULKAN_DEVICE_H_
