// What Apple's systems have beside Linux's Foundation, as far as this package uses it; see swift/scripts/check_apple.py.
// The pages are developer.apple.com/documentation/objectivec/autoreleasepool(invoking:), foundation/urlresourcevalues, and
// the manual's sysctlbyname(3).

import Foundation

func autoreleasepool<Result>(invoking body: () throws -> Result) rethrows -> Result { fatalError() }

func sysctlbyname(
    _ name: UnsafePointer<CChar>!, _ old: UnsafeMutableRawPointer!, _ oldSize: UnsafeMutablePointer<Int>!,
    _ new: UnsafeMutableRawPointer!, _ newSize: Int
) -> Int32 { fatalError() }

extension URLResourceKey {
    static var volumeAvailableCapacityForImportantUsageKey: URLResourceKey { fatalError() }
}

extension URLResourceValues {
    var volumeAvailableCapacityForImportantUsage: Int64? { fatalError() }
}
