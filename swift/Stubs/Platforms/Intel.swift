// On an Intel Mac, Catalyst included, Swift marks Float16 unavailable: stdlib/public/core/FloatingPointTypes.swift.gyb has
// @available(macOS, unavailable) and @available(macCatalyst, unavailable) for it there.

@available(*, unavailable, message: "Float16 is not available on an Intel Mac")
public struct Float16 {
    public var bitPattern: UInt16 { fatalError() }
    public init(bitPattern: UInt16) { fatalError() }
    public init(_ value: Float) { fatalError() }
}

extension Float {
    @available(*, unavailable, message: "Float16 is not available on an Intel Mac")
    public init(_ value: Float16) { fatalError() }
}
