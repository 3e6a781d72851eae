// Writes the hand-made programs of build_program.h into a folder, for fuzzers to begin with: write_seeds FOLDER
#include <cstdio>
#include <string>

#include "build_program.h"

int main(int argc, char** argv) {
    using namespace cofire::test;
    if (argc != 2) return 2;
    const std::pair<const char*, Source> nets[] = {{"residual", residual_net()},   {"elementwise", elementwise_net()},
                                                   {"depthwise", depthwise_net()}, {"policy", policy_net()},
                                                   {"maps", maps_net()},           {"quantized", quantized_net()}};
    for (const auto& [name, net] : nets) {
        const std::vector<uint8_t> bytes = file_of(net);
        std::FILE* file = std::fopen((std::string(argv[1]) + "/" + name + ".cofire").c_str(), "wb");
        if (!file || std::fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size()) return 1;
        std::fclose(file);
    }
}
