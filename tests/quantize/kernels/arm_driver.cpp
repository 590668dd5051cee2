// The extension module without Python: module.cpp with a stand-in for nanobind, driven by recorded calls (see test_arm.py).
//
//     driver LEVEL <calls >results
//
// A call is its name and its arguments. Results are, of each call, all its arrays afterwards and the numbers it returns,
// as doubles.
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "groups.hpp"
#include "instructions.hpp"

// An array, a number or nothing: kinds 'a', 's', 'n', and 't' for the tables of the search.
struct Argument {
    char kind;
    double number = 0;
    size_t bytes = 0;
    std::vector<uint64_t> words{};
};
using Arguments = std::vector<Argument>;
using Function = std::function<std::vector<double>(Arguments&)>;

std::unique_ptr<k2::SearchTables> the_tables;

namespace nanobind {

struct numpy {};
template <int N>
struct ndim {};
struct c_contig {};
namespace device {
struct cpu {};
}  // namespace device
struct gil_scoped_release {};

template <class T, class...>
class ndarray {
   public:
    explicit ndarray(Argument& given)
        : data_(reinterpret_cast<T*>(given.words.data())), size_(given.bytes / sizeof(T)) {}
    T* data() const { return data_; }
    size_t size() const { return size_; }

   private:
    T* data_;
    size_t size_;
};

struct Name {
    Name none() const { return *this; }
};
namespace literals {
inline Name operator""_a(const char*, size_t) { return {}; }
}  // namespace literals

template <class T>
struct Taken {
    static T from(Argument& given) {
        if constexpr (std::is_arithmetic_v<T>) return static_cast<T>(given.number);
        else return T(given);
    }
};
template <class T>
struct Taken<std::optional<T>> {
    static std::optional<T> from(Argument& given) {
        return given.kind == 'n' ? std::nullopt : std::optional<T>(Taken<T>::from(given));
    }
};
template <>
struct Taken<std::string> {
    static std::string from(Argument&) { return {}; }
};
template <>
struct Taken<k2::SearchTables> {
    static k2::SearchTables& from(Argument&) { return *the_tables; }
};

template <class T>
void keep(std::vector<double>& numbers, const T& value) {
    if constexpr (std::is_arithmetic_v<T>) numbers.push_back(static_cast<double>(value));
}
template <class... T>
void keep(std::vector<double>& numbers, const std::tuple<T...>& values) {
    std::apply([&](const T&... value) { (keep(numbers, value), ...); }, values);
}

template <class Result, class... Taking, size_t... I>
std::vector<double> call(Result (*function)(Taking...), Arguments& given, std::index_sequence<I...>) {
    std::vector<double> numbers;
    const auto run = [&] { return function(Taken<std::decay_t<Taking>>::from(given.at(I))...); };
    if constexpr (std::is_void_v<Result>) run();
    else if constexpr (std::is_same_v<Result, std::unique_ptr<k2::SearchTables>>) the_tables = run();
    else keep(numbers, run());
    return numbers;
}

struct Module {
    std::map<std::string, Function> functions{};
    template <class Result, class... Taking, class... Extra>
    void def(const char* name, Result (*function)(Taking...), const Extra&...) {
        functions[name] = [function](Arguments& given) {
            return call(function, given, std::index_sequence_for<Taking...>{});
        };
    }
};

template <class T>
struct class_ {
    Module& module;
    const char* name;
    class_(Module& module, const char* name) : module(module), name(name) {}
    template <class Made, class... Extra>
    void def(Made* made, const Extra&... extra) {
        module.def(name, made, extra...);
    }
};
template <class Made>
Made* new_(Made* made) {
    return made;
}
template <class>
int call_guard() {
    return 0;
}
inline void set_leak_warnings(bool) {}

}  // namespace nanobind

#define NB_MODULE(name, module) void define(nanobind::Module& module)
#include "module.cpp"

bool read_bytes(void* to, size_t size) { return size == 0 || std::fread(to, size, 1, stdin) == 1; }

template <class T>
T read_one() {
    T value{};
    if (!read_bytes(&value, sizeof value)) std::exit(4);
    return value;
}

Argument read_argument() {
    Argument found{read_one<char>()};
    if (found.kind == 's') found.number = read_one<double>();
    if (found.kind == 'a') {
        found.bytes = read_one<uint64_t>();
        found.words.resize(found.bytes / sizeof(uint64_t) + 1);
        if (!read_bytes(found.words.data(), found.bytes)) std::exit(4);
    }
    return found;
}

int main(int, char** words) {
    if (!k2::use_instructions(words[1])) return 3;
    nanobind::Module module;
    define(module);
    for (uint64_t size; read_bytes(&size, sizeof size);) {
        std::string name(size, ' ');
        if (!read_bytes(name.data(), size)) return 4;
        Arguments given(read_one<uint64_t>());
        for (Argument& argument : given) argument = read_argument();
        const Function& function = module.functions.at(name);
        const std::vector<double> numbers = function(given);
        for (const Argument& argument : given) std::fwrite(argument.words.data(), 1, argument.bytes, stdout);
        std::fwrite(numbers.data(), sizeof(double), numbers.size(), stdout);
    }
}
