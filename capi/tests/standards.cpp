// Links files of different standards: compiled as C++17 for the function, and as C++20 for the program that calls it.
#include <vmmfd.hpp>

std::size_t length(const vmmfd::owner<vmmfd_array_t, vmmfd_array_free> &none, vmmfd::span<const int> values);

#if __cplusplus < 202002L
std::size_t length(const vmmfd::owner<vmmfd_array_t, vmmfd_array_free> &none, vmmfd::span<const int> values) {
    return none ? 0 : values.size();
}
#else
int main() {
    const int values[2] = {1, 2};
    return length({}, values) == 2 ? 0 : 1;
}
#endif
