// Memory of a device, and the addresses by which TVM knows it.
#ifndef KVQ_VULKAN_MEMORY_H_
#define KVQ_VULKAN_MEMORY_H_

#include <cstdint>
#include <map>
#include <memory>

#include "limits.h"

namespace kvq {

// A buffer with memory of its own.
struct Buffer {
  VkBuffer handle = VK_NULL_HANDLE;
  VkDeviceMemory memory = VK_NULL_HANDLE;
  uint64_t bytes = 0;
  char* mapped = nullptr;  // where the host sees it, if it does
  // Numbers of the stream's epochs (stream.h) in which commands last wrote and read it.
  uint64_t written = 0, read = 0;
};

// A place in a buffer.
struct Place {
  Buffer* buffer;
  uint64_t offset;
};

// Addresses of a device's buffers. Vulkan has handles where TVM wants pointers that views may add to, so each
// buffer gets a range of addresses that mean nothing to the host; no two ranges are ever the same.
class AddressSpace {
 public:
  explicit AddressSpace(int device_id) : next_(static_cast<uint64_t>(device_id + 1) << kBitsOfDevice) {}

  void* Insert(std::unique_ptr<Buffer> buffer);
  // The buffer that starts at an address, which is free then.
  std::unique_ptr<Buffer> Remove(const void* address);
  // Where an address lies; throws if in no buffer.
  Place Find(const void* address) const;

 private:
  static constexpr int kBitsOfDevice = 56;
  uint64_t next_;
  std::map<uint64_t, std::unique_ptr<Buffer>> buffers_;
};

}  // namespace kvq

#endif  // KVQ_VULKAN_MEMORY_H_
