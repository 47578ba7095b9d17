// swift-tools-version: 6.0
import PackageDescription

// `swift run` opens the window on a Mac. For an iPhone make an app in Xcode, add this repository as a package, and add
// the two files.
let package = Package(
    name: "Chat",
    platforms: [.macOS(.v15), .iOS(.v18), .visionOS(.v2)],
    dependencies: [.package(name: "Shardmill", path: "../../..")],
    targets: [
        .executableTarget(name: "Chat", dependencies: [.product(name: "Shardmill", package: "Shardmill")], path: ".")
    ],
    swiftLanguageModes: [.v6]
)
