// Memory of a die that CANN takes for itself, beside what programs ask it for.
#pragma once
#include <cstddef>

namespace cann {

// Takes `bytes` of a die in huge pages, without anything behind them; false, and nothing taken, where it has too little.
bool take_beside_programs(int die, size_t bytes);
void give_back_beside_programs(int die, size_t bytes);

}  // namespace cann
