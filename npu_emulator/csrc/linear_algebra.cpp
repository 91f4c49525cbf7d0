// Factors and solutions of matrices; products are in arithmetic.cpp.
#include "operators.h"

using namespace cann;

OP(TriangularSolve, [](Tensor self, Tensor matrix, bool upper, bool transposed, bool ones_on_diagonal, Tensor out,
                       Tensor) {
  put(out, at::linalg_solve_triangular(transposed ? matrix.mT() : matrix, self, transposed != upper, true,
                                       ones_on_diagonal));
})
// `mode`: 0 for the reduced factors, 1 for square ones, 2 for the triangle alone.
OP(LinalgQr, [](Tensor self, int64_t mode, Tensor q, Tensor r) {
  const auto [of_q, of_r] = at::linalg_qr(self, c10::string_view(mode == 0 ? "reduced" : mode == 1 ? "complete" : "r"));
  put(q, of_q);
  put(r, of_r);
})
OP(Renorm, [](Tensor self, Scalar p, int64_t dim, Scalar most, Tensor out) { put(out, at::renorm(self, p, dim, most)); })
OP(InplaceRenorm, [](Tensor self, Scalar p, int64_t dim, Scalar most) { self.renorm_(p, dim, most); })
