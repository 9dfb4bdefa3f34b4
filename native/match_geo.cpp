#include "match_geo.hpp"

#include <algorithm>
#include <vector>

namespace virta {

namespace {

constexpr double kEquator = 6378137.0, kPole = 6356752.3142451793;
constexpr double kFlattening = (kEquator - kPole) / kEquator;
constexpr double kThirdFlattening = kFlattening / (2 - kFlattening);
constexpr double kEdgeSineMax = 1e-13, kMeridianDegreesMax = 1e-13;
constexpr double kNorth = 90, kHalfTurn = 180;
// Sphere and ellipsoid differ by 0.56 %: within two percent of the radius the exact formula decides.
constexpr double kMargin = 0.02;
// Below this radius the rounding of the arc cosine is itself near the margin.
constexpr double kQuickRadiusMin = 10.0;
constexpr double kBoundsSlack = 1e-9;  // degrees, for the rounding of cell numbers
constexpr double kLatMax = 720;  // degrees; beyond it, row numbers would not fit
// Nearly opposite points: the first-order formula leaves the sphere by more than the margin.
constexpr double kQuickRadiusMax = 15e6;

double wrapped(double degrees) {
    if (-180 < degrees && degrees <= 180) return degrees;
    double rest = std::fmod(180 - degrees, 360);
    if (rest != 0 && rest < 0) rest += 360;
    return 180 - rest;
}

double meridian(double latitude) {
    return kEquator / (1 + kThirdFlattening) * (latitude - 1.5 * kThirdFlattening * std::sin(2 * latitude));
}

double distance(double lat0, double lon0, double lat, double lon) {
    const double apart = std::fabs(wrapped(lon - lon0));
    const double one = radians(lat0), two = radians(lat);
    if (apart <= kMeridianDegreesMax) return std::fabs(meridian(two) - meridian(one));
    if (apart >= 180 - kMeridianDegreesMax) {
        const double sign = one + two < 0 ? -1 : 1;
        return std::fabs(2 * sign * meridian(M_PI / 2) - meridian(one) - meridian(two));
    }
    const double sine1 = std::sin(one), sine2 = std::sin(two);
    double cosine = sine1 * sine2 + std::cos(one) * std::cos(two) * std::cos(radians(apart));
    cosine = std::max(-1.0, std::min(1.0, cosine));
    const double arc = std::acos(cosine), sine = std::sin(arc);
    const double near = cosine < 1 ? (arc + 3 * sine) / (1 - cosine) : 0.0;
    const double far = cosine > -1 ? (arc - 3 * sine) / (1 + cosine) : 0.0;
    const double less = sine1 - sine2, more = sine1 + sine2;
    return kEquator * (arc - kFlattening / 4 * (near * (less * less) + far * (more * more)));
}

Vector unit(const Vector& v) {
    const double length = std::hypot(v.x, v.y, v.z);
    return length == 0 ? v : Vector{v.x / length, v.y / length, v.z / length};
}

Vector cross(const Vector& a, const Vector& b) {
    return {a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x};
}

// The vertices' longitudes; a pole has none of its own and gets that of the vertex before it.
std::vector<double> longitudes_of(const double* numbers, uint32_t count) {
    std::vector<double> longitudes(count);
    for (uint32_t i = 0; i < count; i++) longitudes[i] = numbers[2 * i + 1];
    uint32_t first = 0;
    while (first < count && std::fabs(numbers[2 * first]) == kNorth) first++;
    if (first == count) first = 0;
    for (uint32_t i = first + 1; i < first + count; i++) {
        const uint32_t at = i % count, before = at ? at - 1 : count - 1;
        if (std::fabs(numbers[2 * at]) == kNorth) longitudes[at] = longitudes[before];
    }
    return longitudes;
}

// 1 for an edge to, from or straight over the North Pole, -1 for the South Pole, else 0.
double pole_of(double lat0, double lat1, double lon_by) {
    if (std::fabs(lat0) == kNorth) return std::copysign(1.0, lat0);
    if (std::fabs(lat1) == kNorth) return std::copysign(1.0, lat1);
    if (std::fabs(lon_by) == kHalfTurn && lat0 + lat1 != 0) return std::copysign(1.0, lat0 + lat1);
    return 0;
}

double angle_cosine(double metres) { return std::cos(metres / kEquator); }

}  // namespace

bool Shape::prepare(const double* numbers, uint32_t count) {
    if (kind == kCircle && count == 3) {
        lat = numbers[0], lon = numbers[1], inner = 0, outer = numbers[2];
        prepare_circle();
    } else if (kind == kAnnulus && count == 4) {
        lat = numbers[0], lon = numbers[1], inner = numbers[2], outer = numbers[3];
        prepare_circle();
    } else if (kind == kBox && count == 4) {
        top = numbers[0], left = numbers[1], bottom = numbers[2], right = numbers[3];
        bounds = {bottom, top, left, right, true};
    } else if (kind == kPolygon && count >= 2 && count % 2 == 0) {
        prepare_polygon(numbers, count / 2);
    } else {
        return false;
    }
    return true;
}

void Shape::prepare_circle() {
    centre = vector_of(lat, lon);
    lat_span = degrees(outer / kEquator);
    const double cosine = std::cos(radians(lat));
    lon_span = cosine <= 0 ? HUGE_VAL : degrees(outer / kEquator / cosine);
    bounds = {lat - lat_span, lat + lat_span, lon - lon_span, lon + lon_span, lon_span < 180};
    if (!(outer >= kQuickRadiusMin && outer <= kQuickRadiusMax)) return;
    if (inner > 0 && inner < kQuickRadiusMin) return;
    surely_out = angle_cosine(outer * (1 + kMargin));
    if (inner * (1 + kMargin) < outer * (1 - kMargin)) {
        surely_in = angle_cosine(outer * (1 - kMargin));
        surely_hole = inner > 0 ? angle_cosine(inner * (1 + kMargin)) : 2;
    }
}

// The same as virta.filters.geo._edges, plus the bounds.
void Shape::prepare_polygon(const double* numbers, uint32_t count) {
    double south = HUGE_VAL, north = -HUGE_VAL, west = 0, east = 0, along = 0, weight = 0;
    bool finite = true, touches_north = false, touches_south = false;
    const std::vector<double> longitudes = longitudes_of(numbers, count);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t before = i ? i - 1 : count - 1;
        const double lat0 = numbers[2 * before], lon0 = numbers[2 * before + 1];
        const double lat1 = numbers[2 * i], lon1 = numbers[2 * i + 1];
        const Vector start = vector_of(lat0, lon0), end = vector_of(lat1, lon1);
        Edge edge;
        edge.start = start;
        // The cross product of the ends, computed so that it stays accurate for ends close together.
        edge.normal = unit(cross({start.x + end.x, start.y + end.y, start.z + end.z},
                                 {end.x - start.x, end.y - start.y, end.z - start.z}));
        edge.towards = cross(edge.normal, start);
        edge.back = cross(end, edge.normal);
        edge.lon_from = longitudes[before];
        edge.lon_to = longitudes[i];
        edge.lon_by = wrapped(edge.lon_to - edge.lon_from);
        edge.empty = (lat0 == lat1 && lon0 == lon1) ||
                     (edge.normal.x == 0 && edge.normal.y == 0 && edge.normal.z == 0);
        const double pole = pole_of(lat0, lat1, edge.lon_by);
        edge.polar = edge.lon_by > 0 ? -pole : pole;
        points.push_back(edge);
        // No point of an edge is farther from an end than half its length, so no latitude is either.
        const double half = degrees(std::acos(std::max(-1.0, std::min(1.0, dot(start, end))))) / 2;
        south = std::min(south, std::min(lat0, lat1) - half);
        north = std::max(north, std::max(lat0, lat1) + half);
        along += edge.lon_by;
        weight += edge.lon_by * (start.z + end.z);
        west = std::min(west, along), east = std::max(east, along);
        finite = finite && std::isfinite(lat1) && std::isfinite(lon1) && std::fabs(lat1) <= kNorth;
        touches_north = touches_north || pole > 0;
        touches_south = touches_south || pole < 0;
    }
    southern = !(std::fabs(along) < kHalfTurn || touches_north) && (touches_south || along * weight < 0);
    const double first = longitudes[count - 1];
    // A pole has every longitude: if one may be inside or on the border, longitudes give no bounds.
    const bool polar = north >= kNorth || south <= -kNorth;
    bounds = {south, north, first + west, first + east,
              finite && !polar && east - west < kHalfTurn && std::fabs(along) < 1};
}

bool Shape::contains(const Point& point) const {
    if (kind == kBox) return in_box(point);
    if (!point.finite()) return false;
    return kind == kPolygon ? in_polygon(point) : in_circle(point);
}

bool Shape::in_circle(const Point& point) const {
    if (std::fabs(point.lat - lat) > lat_span) return false;
    if (std::fabs(wrapped(point.lon - lon)) > lon_span) return false;
    const double cosine = dot(centre, point.vector);
    if (surely_out != 2 && cosine < surely_out) return false;
    if (surely_in != 2 && cosine > surely_in && cosine < surely_hole) return true;
    const double metres = distance(lat, lon, point.lat, point.lon);
    return metres <= outer && (kind == kCircle || inner <= metres);
}

bool Shape::in_box(const Point& point) const {
    if (!(bottom <= point.lat && point.lat <= top && std::isfinite(point.lon))) return false;
    if (left <= point.lon && point.lon <= right) return true;
    return point.lon + 360 * std::ceil((left - point.lon) / 360) <= right;
}

bool Shape::in_polygon(const Point& point) const {
    const Vector& at = point.vector;
    const double sign = southern ? -1 : 1;
    int turns = 0;
    for (const Edge& edge : points) {
        if (edge.empty) {
            if (std::fabs(at.x - edge.start.x) <= kEdgeSineMax &&
                std::fabs(at.y - edge.start.y) <= kEdgeSineMax &&
                std::fabs(at.z - edge.start.z) <= kEdgeSineMax)
                return true;
            continue;
        }
        double side = dot(edge.normal, at);
        if (std::fabs(side) <= kEdgeSineMax && dot(edge.towards, at) >= -kEdgeSineMax &&
            dot(edge.back, at) >= -kEdgeSineMax)
            return true;
        if (edge.polar != 0) side = edge.polar;
        const double here = wrapped(edge.lon_from - point.lon);
        // Exactly `here` of the next edge, so each vertex is on the same side for both edges.
        double there = wrapped(edge.lon_to - point.lon);
        there += 360 * std::floor((here + edge.lon_by - there) / 360 + 0.5);
        if (here <= 0 && 0 < there)
            turns += sign * side > 0;
        else if (there <= 0 && 0 < here)
            turns -= sign * side < 0;
    }
    return turns != 0;
}

// The finest grid whose cells are at least as large as the bounds: four cells hold any shape.
bool cells_of(const Bounds& bounds, Cells& cells) {
    const double south = bounds.south - kBoundsSlack, north = bounds.north + kBoundsSlack;
    const double west = bounds.west - kBoundsSlack, east = bounds.east + kBoundsSlack;
    const double size = std::max(north - south, east - west);
    // A program may hold a box upside down, which no filter is.
    if (!bounds.usable || !(south <= north && west <= east) || !(size > 0 && size < 180) ||
        std::fabs(south) > kLatMax || std::fabs(north) > kLatMax ||
        !std::isfinite(west))
        return false;
    cells.level = std::min<uint32_t>(kGridLevelMax, static_cast<uint32_t>(std::floor(std::log2(360 / size))));
    cells.west = grid_column(west, cells.level);
    const uint32_t around = 1u << cells.level;
    cells.columns = ((grid_column(east, cells.level) - cells.west) & (around - 1)) + 1;
    cells.south = grid_row(south, cells.level);
    cells.rows = static_cast<uint32_t>(grid_row(north, cells.level) - cells.south) + 1;
    return true;
}

uint32_t grid_column(double lon, uint32_t level) {
    double east = std::fmod(lon, 360);
    if (east < 0) east += 360;
    const uint32_t around = 1u << level;
    return static_cast<uint32_t>(east / 360 * around) & (around - 1);
}

int32_t grid_row(double lat, uint32_t level) {
    return static_cast<int32_t>(std::floor(lat / 360 * (1u << level)));
}

}  // namespace virta
