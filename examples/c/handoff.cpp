// The same as handoff.c, with the C++17 layer: serves or takes 1,024 floats. Build:
//   c++ -std=c++17 -Wall -Wextra -pedantic handoff.cpp -o handoff $(pkg-config --cflags --libs vmmfd)
#include <iostream>
#include <string>
#include <vector>
#include <vmmfd.hpp>

int main(int argc, char **argv) {
    const std::string role = argc > 1 ? argv[1] : "";
    if (argc < 3 || (role != "serve" && role != "take")) {
        std::cerr << "usage: handoff serve|take PATH [cuda|host]\n";
        return 2;
    }
    try {
        vmmfd::device device(argc > 3 ? argv[3] : "");
        std::vector<float> values(1024);
        if (role == "serve") {
            for (std::size_t i = 0; i < values.size(); i++)
                values[i] = 0.5f * static_cast<float>(i);
            vmmfd::memory memory(device, values.size() * sizeof(float));
            memory.copy_in(0, values);
            vmmfd::array(memory, "float32", {values.size()}).serve(argv[2]);
        } else {
            auto array = vmmfd::array::take(argv[2], &device);
            array.memory().copy_out(array.info().offset, values);
            std::cout << "took " << array.shape()[0] << " " << array.info().dtype << ", the last is " << values.back() << "\n";
        }
    } catch (const vmmfd::error &error) {
        std::cerr << "handoff: " << error.what() << "\n";
        return 1;
    }
}
