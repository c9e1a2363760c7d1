// What the processor says of its AMX tiles: CPUID leaf 1Dh, palette 1.
#include <cpuid.h>

// Rows of a tile, or 0 where the leaf is absent or hidden.
long gyre_tile_rows(void) {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(0x1d, 1, &eax, &ebx, &ecx, &edx)) return 0;
    return ecx & 0xffff;
}
