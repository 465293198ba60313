// CUDA for a torch that was built without it, as far as tensors without memory need it.
//
// A tensor of FakeTensorMode on `cuda` takes torch's own dispatch for CUDA, but nothing is computed. What torch asks on
// the way is which device is current, which stream, and whether there is CUDA at all: it asks a device guard and the
// hooks of CUDA. A CPU build has no guard, and hooks that say no. Here are a guard and hooks that answer for one device.
//
// `parcompile_cuda_install` puts them in place. torch makes its hooks once and keeps them, mostly while it is imported,
// so that ours cannot be registered in time: the hooks that it has get our virtual table instead. Both classes have no
// data, which the assertion below holds. It has to be called before the first backward pass of the process, when torch
// starts a thread for each device. `parcompile_cuda_remove` puts back what was there.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <string>

namespace {

constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;

// One device: number 0 is always current.
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCuda; }
  c10::Device exchangeDevice(c10::Device) const override { return {kCuda, 0}; }
  c10::Device getDevice() const override { return {kCuda, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, stream.device());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    static int recorded;
    *event = &recorded;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

struct Hooks final : public at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  std::string showConfig() const override { return "CUDA on a host without it"; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

static_assert(sizeof(Hooks) == sizeof(void*) && sizeof(at::CUDAHooksInterface) == sizeof(void*),
              "the hooks of CUDA have data: their virtual table alone cannot be exchanged");

Guard guard;
Hooks hooks;
void* table_before = nullptr;

void* torchs_hooks() { return const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks()); }

}  // namespace

extern "C" void parcompile_cuda_install() {
  if (table_before != nullptr) return;
  std::memcpy(&table_before, torchs_hooks(), sizeof(void*));
  std::memcpy(torchs_hooks(), static_cast<void*>(&hooks), sizeof(void*));
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kCuda)].store(&guard);
}

extern "C" void parcompile_cuda_remove() {
  if (table_before == nullptr) return;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kCuda)].store(nullptr);
  std::memcpy(torchs_hooks(), &table_before, sizeof(void*));
  table_before = nullptr;
}
