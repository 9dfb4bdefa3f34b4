// Shapes on the globe: whether a point is inside, and which cells of the grid they cover.
//
// The arithmetic is that of virta.filters.geo, operation for operation; read the formulas there. Far from a
// circle's edge the angle between two unit vectors decides alone: three multiplications.
#pragma once

#include <cmath>
#include <cstdint>

#include "match_memory.hpp"

namespace virta {

struct Vector {
    double x = 0, y = 0, z = 0;
};

inline double dot(const Vector& a, const Vector& b) { return a.x * b.x + a.y * b.y + a.z * b.z; }

inline double radians(double degrees) { return degrees * (M_PI / 180.0); }
inline double degrees(double radians) { return radians * (180.0 / M_PI); }

inline Vector vector_of(double lat, double lon) {
    const double latitude = radians(lat), longitude = radians(lon), cosine = std::cos(latitude);
    return {cosine * std::cos(longitude), cosine * std::sin(longitude), std::sin(latitude)};
}

struct Point {
    double lat = 0, lon = 0;
    Vector vector;
    float rough_lat = 0, rough_lon = 0;  // the longitude within 180 degrees
    Point() = default;
    Point(double lat_, double lon_)
        : lat(lat_),
          lon(lon_),
          vector(vector_of(lat_, lon_)),
          rough_lat(static_cast<float>(lat_)),
          rough_lon(static_cast<float>(std::remainder(lon_, 360))) {}
    bool finite() const { return std::isfinite(lat) && std::isfinite(lon); }
};

struct Edge {
    Vector start, normal, towards, back;  // the normal of its plane; at each end the direction to the other
    double lon_from = 0, lon_to = 0, lon_by = 0;
    double polar = 0;  // to or over a pole: on which side of it every point is
    bool empty = false;  // both ends are one point
};

struct Bounds {  // in degrees; east may pass 180. Not usable: the shape may be anywhere
    double south = 0, north = 0, west = 0, east = 0;
    bool usable = false;
};

// A box in single precision, rounded outwards: refuses most points from one cache line.
struct RoughBox {
    float lat = 0, lon = 0, lat_half = HUGE_VALF, lon_half = HUGE_VALF;
    RoughBox() = default;
    explicit RoughBox(const Bounds& bounds) {
        if (!bounds.usable) return;
        constexpr double kSlack = 1e-4;
        lat = static_cast<float>((bounds.north + bounds.south) / 2);
        lon = static_cast<float>(std::remainder((bounds.east + bounds.west) / 2, 360));
        lat_half = static_cast<float>((bounds.north - bounds.south) / 2 * (1 + kSlack) + kSlack);
        lon_half = static_cast<float>((bounds.east - bounds.west) / 2 * (1 + kSlack) + kSlack);
    }
    bool excludes(const Point& point) const {
        const float apart = std::fabs(point.rough_lon - lon);
        return std::fabs(point.rough_lat - lat) > lat_half || std::fmin(apart, 360 - apart) > lon_half;
    }
};

enum ShapeKind : uint8_t { kCircle = 1, kAnnulus, kBox, kPolygon };

struct Shape {
    ShapeKind kind = kCircle;
    double lat = 0, lon = 0, inner = 0, outer = 0;         // circle and annulus, metres
    double top = 0, left = 0, bottom = 0, right = 0;       // box
    Vector centre;
    double lat_span = 0, lon_span = 0;                     // of the rough box round a circle
    double surely_in = 2, surely_out = 2, surely_hole = 2;  // cosines of angles; 2 is never
    List<Edge> points;                              // polygon
    bool southern = false;                          // a polygon round the South Pole
    Bounds bounds;

    // Fills in what is derived; false when the kind or the numbers make no shape.
    bool prepare(const double* numbers, uint32_t count);
    bool contains(const Point& point) const;

  private:
    void prepare_circle();
    void prepare_polygon(const double* numbers, uint32_t count);
    bool in_circle(const Point& point) const;
    bool in_box(const Point& point) const;
    bool in_polygon(const Point& point) const;
};

// The grid: 2^level cells round the equator, and cells of the same degrees along the meridian.
constexpr uint32_t kGridLevelMax = 24;

struct Cells {
    uint32_t level = 0;
    uint32_t west = 0, columns = 0;
    int32_t south = 0;
    uint32_t rows = 0;
};

bool cells_of(const Bounds& bounds, Cells& cells);
uint32_t grid_column(double lon, uint32_t level);
int32_t grid_row(double lat, uint32_t level);

}  // namespace virta
