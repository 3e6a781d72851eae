// The kernels of one instruction set as a table.
#include "functions.h"
#include "vec.h"

#define COFIRE_TEXT(x) #x
#define COFIRE_NAME(x) COFIRE_TEXT(x)

namespace cofire {
namespace COFIRE_ISA {

extern const Kernels kernels;
const Kernels kernels{COFIRE_NAME(COFIRE_ISA),
                      kLanes,
                      kTileRows,
                      kTileVectors,
                      gemm,
                      gemm_finished,
                      wino_input,
                      wino_output,
                      finish,
                      dot,
                      dots,
                      add_lanes,
                      filters,
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
