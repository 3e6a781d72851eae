// The leaves of one instruction set as a table.
#include "leaves.h"
#include "vec.h"

#define COFIRE_TEXT(x) #x
#define COFIRE_NAME(x) COFIRE_TEXT(x)

namespace cofire {
namespace COFIRE_ISA {

extern const Leaf leaf;
const Leaf leaf{COFIRE_NAME(COFIRE_ISA),
                kLanes,
                kTileRows,
                kTileVectors,
                gemm,
                gemm_finished,
                wino_input,
                wino_output,
                finish,
                dot,
                depthwise,
                depthwise3,
                max_pool,
                take,
                softmax,
                maximum,
                largest,
                sum,
                sum_of_magnitudes,
                finite};

}  // namespace COFIRE_ISA
}  // namespace cofire
