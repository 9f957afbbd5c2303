#include "memory.h"

#include <tvm/ffi/error.h>

namespace kvq {

namespace {
// Every buffer starts at a multiple of what TVM and any device's descriptors ask of alignment.
constexpr uint64_t kAlignment = 4096;
}  // namespace

void* AddressSpace::Insert(std::unique_ptr<Buffer> buffer) {
  uint64_t address = next_;
  next_ += (buffer->bytes / kAlignment + 2) * kAlignment;
  buffers_[address] = std::move(buffer);
  return reinterpret_cast<void*>(address);
}

std::unique_ptr<Buffer> AddressSpace::Remove(const void* address) {
  auto found = buffers_.find(reinterpret_cast<uint64_t>(address));
  TVM_FFI_ICHECK(found != buffers_.end()) << "no Vulkan buffer starts at " << address;
  std::unique_ptr<Buffer> buffer = std::move(found->second);
  buffers_.erase(found);
  return buffer;
}

Place AddressSpace::Find(const void* address) const {
  uint64_t wanted = reinterpret_cast<uint64_t>(address);
  auto after = buffers_.upper_bound(wanted);
  TVM_FFI_ICHECK(after != buffers_.begin()) << "no Vulkan buffer holds " << address;
  const auto& [start, buffer] = *std::prev(after);
  TVM_FFI_ICHECK_LT(wanted - start, buffer->bytes) << "no Vulkan buffer holds " << address;
  return {buffer.get(), wanted - start};
}

}  // namespace kvq
